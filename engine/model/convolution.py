"""The short causal convolution of recurrent layers, one filter per channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels import native
from engine.model.context import Context
from engine.model.states import StateRows, advance


def convolve(
    context: Context,
    rows: StateRows,
    array: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves each channel with its last inputs, those before this step out of the state.

    Args:
        context: The step.
        rows: Its rows in the layer.
        array: f32 [units, K - 1, channels], the last inputs of every state, oldest first.
        x: f32 [N, channels].
        kernel: f32 [channels, K]; the last tap meets the token itself.
        bias: f32 [channels], added to the sums.

    Returns:
        f32 [N, channels] and the array with the new states.
    """
    if context.weights.is_native:
        result, array = native.convolve(
            array,
            x,
            kernel,
            context.step.positions,
            rows.units,
            num_decodes=rows.num_decodes,
        )
        return result if bias is None else result + bias, array
    taps = kernel.shape[1]
    is_token = rows.is_token

    def step(held: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        window = jnp.concatenate([held, inputs[0][:, None]], axis=1)
        result = sum(window[:, tap] * kernel[:, tap] for tap in range(1, taps))
        return window[:, 0] * kernel[:, 0] + result, window[:, 1:]

    def chunk(held: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        num = len(inputs[0])
        window = jnp.concatenate([held, inputs[0]])
        result = sum(window[tap : tap + num] * kernel[:, tap] for tap in range(1, taps))
        count = is_token[rows.num_decodes :].sum()
        state = lax.dynamic_slice_in_dim(window, count, taps - 1)
        return window[:num] * kernel[:, 0] + result, state

    result, array = advance(rows, array, (x,), step=step, chunk=chunk)
    return result if bias is None else result + bias, array

"""The Mamba 2 mixer: a step form, and a chunked one that does a block of tokens in products.

Source: Dao and Gu 2024 (Mamba 2), the state-space dual form in section 6.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.kernels import flow, native
from engine.model.context import Context, vector
from engine.model.convolution import convolve
from engine.model.place import Place
from engine.model.recurrent_spec import SsmSpec
from engine.model.states import StatePool, StateRows, advance, in_blocks
from engine.model.weights import LayerArrays


def mix(
    context: Context,
    spec: SsmSpec,
    own: LayerArrays,
    place: Place,
    x: jax.Array,
    pool: StatePool,
) -> tuple[jax.Array, StatePool]:
    """What the mixer makes of f32 [N, width], and the states after it."""
    rows = StateRows.of(context, place)
    fused = context.linear(own, "ssm_in", x)
    gate, mixed, raw_steps = jnp.split(fused, [spec.inner, spec.inner + spec.channels], axis=-1)
    bias = vector(own, "ssm_conv1d.bias") if spec.has_conv_bias else None
    mixed, conv = convolve(context, rows, pool.conv, mixed, vector(own, "ssm_conv1d.weight"), bias)
    mixed = jax.nn.silu(mixed)
    shared = spec.num_groups * spec.state_dim
    values, inputs, outputs = jnp.split(mixed, [spec.inner, spec.inner + shared], axis=-1)
    values = values.reshape(-1, spec.num_heads, spec.head_dim)
    inputs, outputs = (
        part.reshape(-1, spec.num_groups, spec.state_dim) for part in (inputs, outputs)
    )
    steps = jax.nn.softplus(raw_steps + vector(own, "ssm_dt.bias"))
    # A token without a step leaves the state as it is.
    steps = jnp.where(rows.is_token[:, None], steps, 0.0)
    decays = steps * vector(own, "ssm_a").reshape(-1)
    assert pool.matrix is not None
    parts = (outputs, inputs, values * steps[..., None], decays)
    if context.weights.is_native:
        y, matrix = native.recur(
            pool.matrix,
            *parts[:3],
            jnp.exp(decays),
            None,
            context.step.positions,
            rows.units,
            num_decodes=rows.num_decodes,
            is_interleaved=True,
        )
    else:
        y, matrix = advance(rows, pool.matrix, parts, step=step_form, chunk=chunked_form)
    y = y + values * vector(own, "ssm_d").reshape(-1, 1)
    y = y.reshape(-1, spec.inner) * jax.nn.silu(gate)
    if spec.has_norm:
        weight = vector(own, "ssm_norm.weight")
        grouped = y.reshape(-1, spec.num_groups, spec.inner // spec.num_groups)
        y = (context.norm(grouped, jnp.ones_like(weight[0])) * weight).reshape(-1, spec.inner)
    return context.linear(own, "ssm_out", y), StatePool(conv, matrix)


def step_form(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One token each of D rows.

    Args:
        state: f32 [D, heads, state_dim, head_dim].
        parts: C and B [D, groups, state_dim], values times their time step [D, heads, head_dim],
            logs of the decays [D, heads].

    Returns:
        f32 [D, heads, head_dim] and the new state.
    """
    outputs, inputs, values, decays = parts
    each = values.shape[1] // inputs.shape[1]
    inputs, outputs = (part.repeat(each, axis=1) for part in (inputs, outputs))
    state = state * jnp.exp(decays)[..., None, None] + inputs[..., None] * values[:, :, None]
    return jnp.einsum("dhsp,dhs->dhp", state, outputs), state


def chunked_form(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """T tokens of one row: as `step_form` token by token, in sums of another order.

    Args:
        state: f32 [heads, state_dim, head_dim].
        parts: As of `step_form`, [T, ...]; a value and a decay of 0 leave the state as it is.

    Returns:
        f32 [T, heads, head_dim] and the new state.
    """
    num, heads, head_dim = parts[2].shape
    groups = parts[0].shape[1]
    by_group = (groups, heads // groups)

    def block(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        outputs, inputs, values, decays = parts
        size = len(values)
        passed = jnp.cumsum(decays, axis=0)  # [Q, H]
        age = passed[:, None] - passed[None]  # [Q, Q, H]
        is_past = jnp.tril(jnp.ones((size, size), bool))[..., None]
        fade = jnp.exp(jnp.where(is_past, age, -jnp.inf))
        scores = jnp.einsum("igs,jgs->ijg", outputs, inputs).repeat(heads // groups, axis=2)
        y = jnp.einsum("ijh,jhp->ihp", scores * fade, values)
        grouped = state.reshape(*by_group, -1, head_dim)
        old = jnp.einsum("igs,gksp->igkp", outputs, grouped).reshape(size, heads, head_dim)
        y = y + old * jnp.exp(passed)[..., None]
        kept = (values * jnp.exp(passed[-1] - passed)[..., None]).reshape(size, *by_group, head_dim)
        added = jnp.einsum("jgs,jgkp->gksp", inputs, kept).reshape(state.shape)
        return state * jnp.exp(passed[-1])[:, None, None] + added, y

    state, y = flow.scan_out(block, state, in_blocks(parts))
    return y.reshape(-1, heads, head_dim)[:num], state

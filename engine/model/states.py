"""The states of recurrent layers: where they lie, and how a step carries them on.

The states of all layers lie in one array per part, [units, ...]. A layer owns a run of units; the
first of them is its sink, to which padding writes. A sequence that begins (position 0) starts from
zeros whatever its unit holds, so that nobody has to clear one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from engine.model.context import Context
from engine.model.place import Place
from engine.model.recurrent_spec import StateShape

BLOCK_TOKENS = 64
"""Tokens that the chunked forms on XLA take at a time."""

# (state, inputs) to (result, state): of D rows with one token each, or of one row with T tokens.
Form = Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StatePool:
    """The states of every recurrent layer, f32.

    `conv` is [units, inputs, channels], `matrix` [units, heads, rows, cols] or None where the
    layers have none.
    """

    conv: jax.Array
    matrix: jax.Array | None


@dataclass(frozen=True)
class StateRows:
    """The rows of a step in one layer.

    `units` int32 [R] is each row's state, `is_fresh` bool [R] says that it begins with this step,
    `is_token` bool [N] is False for padding. The first `num_decodes` tokens are rows of their own,
    all others the last row's.
    """

    units: jax.Array
    is_fresh: jax.Array
    is_token: jax.Array
    num_decodes: int

    @staticmethod
    def of(context: Context, place: Place) -> StateRows:
        """The rows of this step at a layer's place."""
        step, num_decodes = context.step, context.num_decodes
        first_positions = step.positions[: num_decodes + 1]
        return StateRows(
            units=step.states + place.first_state,
            is_fresh=first_positions <= 0,
            is_token=step.positions >= 0,
            num_decodes=num_decodes,
        )


def new_states(shape: StateShape, num_units: int) -> StatePool:
    """States of zeros."""
    conv = jnp.zeros((num_units, *shape.conv), jnp.float32)
    if shape.matrix is None:
        return StatePool(conv, None)
    return StatePool(conv, jnp.zeros((num_units, *shape.matrix), jnp.float32))


def advance(
    rows: StateRows, array: jax.Array, inputs: tuple[jax.Array, ...], *, step: Form, chunk: Form
) -> tuple[jax.Array, jax.Array]:
    """Carries a step's rows on, each by the form that fits.

    Args:
        rows: The rows.
        array: Their states among others, f32 [units, ...].
        inputs: Of each token, [N, ...]; padding must leave a state as it is in a chunk.
        step: Takes states [D, ...] and inputs [D, ...].
        chunk: Takes one state and inputs [T, ...].

    Returns:
        Results [N, ...] and the array with the new states.
    """
    num = rows.num_decodes
    fresh = rows.is_fresh.reshape(-1, *[1] * (array.ndim - 1))
    held = jnp.where(fresh, 0.0, array[rows.units])
    results: list[jax.Array] = []
    states: list[jax.Array] = []
    if num:
        result, state = step(held[:num], tuple(part[:num] for part in inputs))
        results.append(result)
        states.append(state)
    if len(rows.is_token) > num:
        result, state = chunk(held[num], tuple(part[num:] for part in inputs))
        results.append(result)
        states.append(state[None])
    return jnp.concatenate(results), array.at[rows.units].set(jnp.concatenate(states))


def in_blocks(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Splits [T, ...] into blocks [B, Q, ...], the last one padded with zeros."""
    size = min(BLOCK_TOKENS, len(parts[0]))
    missing = -len(parts[0]) % size

    def split(part: jax.Array) -> jax.Array:
        padded = jnp.pad(part, [(0, missing), *[(0, 0)] * (part.ndim - 1)])
        return padded.reshape(-1, size, *part.shape[1:])

    return tuple(split(part) for part in parts)

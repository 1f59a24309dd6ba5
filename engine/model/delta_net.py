"""The gated delta net: a step form, and a chunked one that does a block of tokens in products.

Source: Yang et al. 2024 (Gated Delta Networks), the WY form of section 3.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from engine.kernels import flow, native
from engine.model.context import Context, vector
from engine.model.convolution import convolve
from engine.model.place import Place
from engine.model.recurrent_spec import DeltaNetSpec
from engine.model.states import StatePool, StateRows, advance, in_blocks
from engine.model.weights import LayerArrays


def mix(
    context: Context,
    spec: DeltaNetSpec,
    own: LayerArrays,
    place: Place,
    x: jax.Array,
    pool: StatePool,
) -> tuple[jax.Array, StatePool]:
    """What the mixer makes of f32 [N, width], and the states after it."""
    rows = StateRows.of(context, place)
    fused, gate, raw_strengths, raw_decays = _projections(context, spec, own, x)
    mixed, conv = convolve(context, rows, pool.conv, fused, vector(own, "ssm_conv1d.weight"), None)
    splits = [spec.key_width, 2 * spec.key_width]
    queries, keys, values = (
        part.reshape(len(x), -1, spec.head_dim)
        for part in jnp.split(jax.nn.silu(mixed), splits, axis=-1)
    )
    queries, keys = (_unit(context, part) for part in (queries, keys))
    strengths = jax.nn.sigmoid(raw_strengths)
    decays = jax.nn.softplus(raw_decays + vector(own, "ssm_dt.bias")) * vector(own, "ssm_a")
    # A token without strength and decay leaves the state as it is.
    strengths, decays = (
        jnp.where(rows.is_token[:, None], part, 0.0) for part in (strengths, decays)
    )
    assert pool.matrix is not None
    queries = queries * spec.head_dim**-0.5
    if context.weights.is_native:
        y, matrix = native.recur(
            pool.matrix,
            queries,
            keys,
            values,
            jnp.exp(decays),
            strengths,
            context.step.positions,
            rows.units,
            num_decodes=rows.num_decodes,
            is_interleaved=spec.is_interleaved,
        )
    else:
        queries, keys = (_by_value_head(spec, part) for part in (queries, keys))
        parts = (queries, keys, values, decays, strengths)
        y, matrix = advance(rows, pool.matrix, parts, step=step_form, chunk=chunked_form)
    y = context.norm(y, vector(own, "ssm_norm.weight")).reshape(len(x), -1)
    return context.linear(own, "ssm_out", y * jax.nn.silu(gate)), StatePool(conv, matrix)


def _projections(
    context: Context, spec: DeltaNetSpec, own: LayerArrays, x: jax.Array
) -> list[jax.Array]:
    """Queries, keys and values in one, the gate, and by value head strengths and decays."""
    if not spec.is_fused:
        return context.linears(own, ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"), x)
    fused, gate, both = context.linears(own, ("attn_qkv", "attn_gate", "ssm_ba"), x)
    by_head = both.reshape(len(x), spec.num_key_heads, 2, -1)
    strengths, decays = (by_head[:, :, part].reshape(len(x), -1) for part in (0, 1))
    return [fused, gate, strengths, decays]


def _unit(context: Context, x: jax.Array) -> jax.Array:
    """Vectors of length 1: an RMS norm whose epsilon and weight are those of a sum of squares."""
    dim = x.shape[-1]
    weight = jnp.full(dim, dim**-0.5, jnp.float32)
    return context.norm(x, weight, context.spec.norm_eps / dim)


def _by_value_head(spec: DeltaNetSpec, x: jax.Array) -> jax.Array:
    """Gives every value head its key head, f32 [N, value heads, head_dim]."""
    heads = np.arange(spec.num_value_heads)
    each = spec.num_value_heads // spec.num_key_heads
    return x[:, heads // each if spec.is_interleaved else heads % spec.num_key_heads]


def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """Inverts 1 + `below`, f32 [..., n, n] and zero on and above the diagonal.

    Blocks of 1, 2, 4, ... are joined in pairs, which is as stable as to solve row by row; the series
    of powers of `below` is not where keys are alike.
    """
    size = below.shape[-1]
    width = 1 << (size - 1).bit_length()
    pad = [(0, 0)] * (below.ndim - 2) + [(0, width - size)] * 2
    below, lead = jnp.pad(below, pad), below.shape[:-2]
    inverse = jnp.ones((*lead, width, 1, 1), jnp.float32)
    side = 1
    while side < width:
        pairs = width // (2 * side)
        blocks = below.reshape(*lead, pairs, 2 * side, pairs, 2 * side)
        pair = jnp.arange(pairs)
        # The blocks on the diagonal; indexing two axes at once puts them first.
        own = jnp.moveaxis(blocks[..., pair, :, pair, :], 0, -3)
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -second @ own[..., side:, :side] @ first
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        side *= 2
    return inverse[..., 0, :size, :size]


def step_form(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One token each of D rows.

    Args:
        state: f32 [D, heads, dim of keys, dim of values].
        parts: Scaled queries, keys and values [D, heads, dim], logs of the decays and strengths
            [D, heads].

    Returns:
        f32 [D, heads, dim] and the new state.
    """
    queries, keys, values, decays, strengths = parts
    state = state * jnp.exp(decays)[..., None, None]
    missing = values - jnp.einsum("dhkv,dhk->dhv", state, keys)
    state = state + keys[..., None] * (missing * strengths[..., None])[:, :, None]
    return jnp.einsum("dhkv,dhk->dhv", state, queries), state


def chunked_form(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """T tokens of one row: as `step_form` token by token, in sums of another order.

    What each token of a block writes depends on what the earlier ones wrote; a triangular system
    gives all of it at once.

    Args:
        state: f32 [heads, dim of keys, dim of values].
        parts: As of `step_form`, [T, ...]; a strength and a decay of 0 leave the state as it is.

    Returns:
        f32 [T, heads, dim] and the new state.
    """
    num, heads, dim = parts[2].shape

    def block(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        queries, keys, values = (part.swapaxes(0, 1) for part in parts[:3])  # [H, Q, D]
        decays, strengths = (part.T for part in parts[3:])  # [H, Q]
        size = keys.shape[1]
        passed = jnp.cumsum(decays, axis=1)
        is_past = jnp.tril(jnp.ones((size, size), bool))
        age = passed[:, :, None] - passed[:, None]
        fade = jnp.exp(jnp.where(is_past, age, -jnp.inf))
        strong_keys = keys * strengths[..., None]
        overlap = jnp.tril(jnp.einsum("hid,hjd->hij", strong_keys, keys) * fade, -1)
        wanted = values - (keys * jnp.exp(passed)[..., None]) @ state
        written = unit_lower_inverse(overlap) @ (wanted * strengths[..., None])
        scores = jnp.einsum("hid,hjd->hij", queries, keys) * fade
        y = (queries * jnp.exp(passed)[..., None]) @ state + scores @ written
        kept = keys * jnp.exp(passed[:, -1:] - passed)[..., None]
        state = state * jnp.exp(passed[:, -1])[:, None, None]
        return state + kept.swapaxes(1, 2) @ written, y.swapaxes(0, 1)

    state, y = flow.scan_out(block, state, in_blocks(parts))
    return y.reshape(-1, heads, dim)[:num], state

"""The decoder: one step of a `ModelSpec` over paged state, as a pure function.

A step evaluates N = D + C tokens: D decode rows of one token each, then a chunk of C tokens of
one sequence. Layers that repeat are one `lax.scan`, and so are patterns of layers, so neither
program size nor compile time grows with depth; what differs between the layers of a run (window,
rope, places in the pools) is data. Norms, rope and softmax are f32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp

from engine.kernels import flow
from engine.kernels.lora import Bank, adapt_embedding
from engine.kernels.qmatmul import MatrixStack, gather_rows, qmatmul
from engine.model.adapter_banks import BankArrays
from engine.model.attention import KvPool
from engine.model.context import Context, StepInputs, turns_of, vector
from engine.model.ffn import dense_ffn
from engine.model.grouped_query import grouped_query_attention
from engine.model.latent import latent_attention
from engine.model.moe import moe_ffn
from engine.model.place import Place
from engine.model.recurrent import mix_recurrent
from engine.model.spec import (
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    Ffn,
    LatentAttentionSpec,
    Mixer,
    ModelSpec,
    MoeFfnSpec,
)
from engine.model.states import StatePool
from engine.model.weights import LayerArrays, Weights

# Activations f32 [N, width], then all that the layers keep of sequences.
_Carry = tuple[jax.Array, KvPool, StatePool | None]
# What differs between the layers of a run, one entry each: weights, places and numbers in the run.
_Layers = tuple[LayerArrays, Place, jax.Array]


@dataclass(frozen=True)
class _Run:
    """Equal blocks: their layers, and the banks of their adapters."""

    block: BlockSpec
    layers: _Layers
    banks: Mapping[str, Bank]


def forward(
    spec: ModelSpec,
    weights: Weights,
    places: Place,
    pool: KvPool,
    states: StatePool | None,
    step: StepInputs,
    num_decodes: int,
    banks: BankArrays | None = None,
    *,
    has_hidden: bool = False,
) -> tuple[jax.Array, jax.Array | None, KvPool, StatePool | None]:
    """Evaluates one step.

    Args:
        spec: The model, at its context (`ModelSpec.at_context`).
        weights: Its weights.
        places: One entry per layer.
        pool: Keys and values; the result holds this step's too.
        states: What recurrent layers keep, None in models without them; likewise.
        step: What to evaluate.
        num_decodes: D; static.
        banks: The loaded adapters, if the step has lists of them.
        has_hidden: Whether the chunk's hidden states are a result; static.

    Returns:
        f32 logits [R, vocab], the chunk's final hidden states f32 [C, width] (None without), and
        the pools.
    """
    context = Context(
        spec=spec,
        weights=weights,
        step=step,
        live=step.positions,
        num_decodes=num_decodes,
        adapters=step.adapters,
        turns=turns_of(spec, weights, step.positions),
    )
    embedding = cast(MatrixStack, weights.globals["token_embd"])
    x = gather_rows(weights.arena, embedding, step.tokens)
    if banks is not None and step.adapters is not None:
        bank = banks.globals["token_embd"]
        x = adapt_embedding(bank, step.adapters, step.tokens, x, num_decodes=num_decodes)
    if spec.embedding_scale != 1.0:
        x = x * spec.embedding_scale
    carry: _Carry = (x, pool, states)
    runs = iter(_runs(spec, weights, places, banks))
    for cycle in spec.cycles():
        carry = _cycle(context, [next(runs) for _ in cycle.runs], cycle.repeats, carry)
    x, pool, states = carry
    if banks is not None:
        context = replace(context, banks=banks.globals)
    nothing = jnp.zeros((step.outputs.shape[0], spec.vocab_size), jnp.float32)
    # A chunk in the middle of a prompt needs no logits, and the head is the largest matrix.
    logits = flow.cond(step.wants_logits > 0, lambda: _head(context, x), lambda: nothing)
    hidden = None
    if has_hidden:
        hidden = context.norm(x[num_decodes:], vector(weights.globals, spec.output_norm))
    return logits, hidden, pool, states


def _head(context: Context, x: jax.Array) -> jax.Array:
    """Logits of the tokens that want them, f32 [R, vocab]."""
    spec, weights = context.spec, context.weights
    last = context.norm(x[context.step.outputs], vector(weights.globals, spec.output_norm))
    head = weights.globals["token_embd" if spec.tied_head else "output"]
    live = context.step.positions[context.step.outputs]
    # What adapters change of a tied embedding is its rows as inputs, not as outputs.
    changes = None if spec.tied_head else context.changes(("output",))
    logits = qmatmul(weights.arena, cast(MatrixStack, head), last, live=live, changes=changes)
    if spec.has_head_bias:
        logits = logits + vector(weights.globals, "output.bias")
    return _soft_capped(_scaled(logits, spec.logit_scale), spec.logit_soft_cap)


def _runs(spec: ModelSpec, weights: Weights, places: Place, banks: BankArrays | None) -> list[_Run]:
    return [
        _Run(
            block=block,
            layers=(arrays, places.part(layers), jnp.arange(len(layers), dtype=jnp.int32)),
            banks=banks.runs[run] if banks else {},
        )
        for run, ((block, layers), arrays) in enumerate(zip(spec.runs(), weights.runs, strict=True))
    ]


def _cycle(context: Context, runs: Sequence[_Run], repeats: int, carry: _Carry) -> _Carry:
    """Runs that follow each other `repeats` times, each with the layers of all repetitions."""
    if repeats == 1:
        for run in runs:
            carry = _run(context, run, run.layers, carry)
        return carry

    def one_round(carry: _Carry, parts: list[_Layers]) -> _Carry:
        for run, layers in zip(runs, parts, strict=True):
            carry = _run(context, run, layers, carry)
        return carry

    def by_round(array: jax.Array) -> jax.Array:
        return array.reshape(repeats, -1, *array.shape[1:])

    return flow.scan(one_round, carry, [jax.tree.map(by_round, run.layers) for run in runs])


def _run(shared: Context, run: _Run, layers: _Layers, carry: _Carry) -> _Carry:
    """Some layers of a run, one after another."""
    block = run.block

    def layer(carry: _Carry, scanned: _Layers) -> _Carry:
        x, pool, states = carry
        own, place, index = scanned
        context = replace(shared, banks=run.banks, layer=index)
        with jax.named_scope("mixer"):
            y = context.norm(x, vector(own, "attn_norm.weight")) if block.has_pre_norms else x
            y, pool, states = _mixed(context, block, own, place, (y, pool, states))
            if block.has_post_norms:
                y = context.norm(y, vector(own, "post_attention_norm.weight"))
            x = x + _scaled(y, block.residual_scale)
        if block.ffn is None:
            return x, pool, states
        with jax.named_scope("ffn"):
            y = context.norm(x, vector(own, block.ffn_norm)) if block.has_pre_norms else x
            y = _feed_forward(context, block.ffn, own, y)
            if block.has_post_norms:
                y = context.norm(y, vector(own, "post_ffw_norm.weight"))
            x = x + _scaled(y, block.residual_scale)
        return x, pool, states

    return flow.scan(layer, carry, layers)


def _mixed(
    context: Context, block: BlockSpec, own: LayerArrays, place: Place, carry: _Carry
) -> _Carry:
    """What attention, a recurrence or both side by side make of the block's normalised input."""
    x, pool, states = carry
    parts: list[jax.Array] = []
    if block.mixer is not None:
        y, pool = _attend(context, block.mixer, own, place, x, pool)
        parts.append(y)
    if block.recurrent is not None:
        assert states is not None
        y, states = mix_recurrent(context, block.recurrent, own, place, x, states)
        parts.append(y)
    return sum(parts[1:], parts[0]), pool, states


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else x * scale


def _attend(
    context: Context, mixer: Mixer, own: LayerArrays, place: Place, x: jax.Array, pool: KvPool
) -> tuple[jax.Array, KvPool]:
    match mixer:
        case AttentionSpec():
            return grouped_query_attention(context, mixer, own, place, x, pool)
        case LatentAttentionSpec():
            return latent_attention(context, mixer, own, place, x, pool)


def _feed_forward(context: Context, ffn: Ffn, own: LayerArrays, x: jax.Array) -> jax.Array:
    match ffn:
        case DenseFfnSpec():
            return dense_ffn(context, ffn, own, x)
        case MoeFfnSpec():
            return moe_ffn(context, ffn, own, x)


def _soft_capped(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x

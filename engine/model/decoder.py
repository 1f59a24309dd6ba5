"""The decoder: one step of a `ModelSpec` over paged state, as a pure function.

A step evaluates N = D + C tokens: D decode rows of one token each, then a chunk of C tokens of
one sequence. Layers that repeat are one `lax.scan`, so neither program size nor compile time grows
with depth; what differs between them (window, rope, place in the pool) is data. Norms, rope and
softmax are f32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp

from engine.kernels import flow
from engine.kernels.lora import adapt_embedding
from engine.kernels.qmatmul import MatrixStack, gather_rows, qmatmul
from engine.model.adapter_banks import BankArrays
from engine.model.attention import KvPool
from engine.model.context import Context, StepInputs, vector
from engine.model.ffn import dense_ffn
from engine.model.grouped_query import grouped_query_attention
from engine.model.latent import latent_attention
from engine.model.moe import moe_ffn
from engine.model.place import Place
from engine.model.rope import angles
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
from engine.model.weights import LayerArrays, Weights


def forward(
    spec: ModelSpec,
    weights: Weights,
    places: Place,
    pool: KvPool,
    step: StepInputs,
    num_decodes: int,
    banks: BankArrays | None = None,
) -> tuple[jax.Array, KvPool]:
    """Evaluates one step.

    Args:
        spec: The model, at its context (`ModelSpec.at_context`).
        weights: Its weights.
        places: One entry per layer.
        pool: Keys and values; the result holds this step's too.
        step: What to evaluate.
        num_decodes: D; static.
        banks: The loaded adapters, if the step has lists of them.

    Returns:
        f32 logits [R, vocab] and the pool.
    """
    context = Context(spec, weights, step, num_decodes, _turns(spec, weights, step.positions))
    embedding = cast(MatrixStack, weights.globals["token_embd"])
    x = gather_rows(weights.arena, embedding, step.tokens)
    if banks is not None and step.adapters is not None:
        bank = banks.globals["token_embd"]
        x = adapt_embedding(bank, step.adapters, step.tokens, x, num_decodes=num_decodes)
    if spec.embedding_scale != 1.0:
        x = x * spec.embedding_scale
    for run, (block, first, count) in enumerate(spec.runs()):
        own = replace(context, banks=banks.runs[run]) if banks else context
        x, pool = _run(own, block, weights.runs[run], places.part(first, count), x, pool)
    if banks is not None:
        context = replace(context, banks=banks.globals)
    nothing = jnp.zeros((step.outputs.shape[0], spec.vocab_size), jnp.float32)
    # A chunk in the middle of a prompt needs no logits, and the head is the largest matrix.
    logits = flow.cond(step.wants_logits > 0, lambda: _head(context, x), lambda: nothing)
    return logits, pool


def _turns(spec: ModelSpec, weights: Weights, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every rope of the model, f32 [ropes, N, dims // 2] each."""
    places = jnp.maximum(positions, 0)
    all_turns = [
        angles(rope, places, vector(weights.globals, rope.factors) if rope.factors else None)
        for rope in spec.ropes
    ]
    return jnp.stack([cos for cos, _ in all_turns]), jnp.stack([sin for _, sin in all_turns])


def _head(context: Context, x: jax.Array) -> jax.Array:
    """Logits of the tokens that want them, f32 [R, vocab]."""
    spec, weights = context.spec, context.weights
    last = context.norm(x[context.step.outputs], vector(weights.globals, "output_norm.weight"))
    head = weights.globals["token_embd" if spec.tied_head else "output"]
    logits = qmatmul(weights.arena, cast(MatrixStack, head), last)
    if not spec.tied_head:
        # What adapters change of a tied embedding is its rows as inputs, not as outputs.
        (logits,) = context.adapted(("output",), last, [logits])
    if spec.has_head_bias:
        logits = logits + vector(weights.globals, "output.bias")
    return _soft_capped(logits, spec.logit_soft_cap)


def _run(
    shared: Context,
    block: BlockSpec,
    arrays: LayerArrays,
    places: Place,
    x: jax.Array,
    pool: KvPool,
) -> tuple[jax.Array, KvPool]:
    """A run of equal blocks: `arrays` and `places` have one entry per layer of it."""

    def layer(
        carry: tuple[jax.Array, KvPool], scanned: tuple[LayerArrays, Place, jax.Array]
    ) -> tuple[jax.Array, KvPool]:
        x, pool = carry
        own, place, index = scanned
        context = replace(shared, layer=index)
        with jax.named_scope("mixer"):
            y = context.norm(x, vector(own, "attn_norm.weight")) if block.has_pre_norms else x
            y, pool = _mix(context, block.mixer, own, place, y, pool)
            if block.has_post_norms:
                y = context.norm(y, vector(own, "post_attention_norm.weight"))
            x = x + y
        with jax.named_scope("ffn"):
            y = context.norm(x, vector(own, block.ffn_norm)) if block.has_pre_norms else x
            y = _feed_forward(context, block.ffn, own, y)
            if block.has_post_norms:
                y = context.norm(y, vector(own, "post_ffw_norm.weight"))
            x = x + y
        return x, pool

    layers = jnp.arange(places.kind.shape[0], dtype=jnp.int32)
    return flow.scan(layer, (x, pool), (arrays, places, layers))


def _mix(
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

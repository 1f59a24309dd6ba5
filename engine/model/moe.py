"""The mixture-of-experts feed-forward: a router, a few experts per token, and a shared one.

Routing and products are llama.cpp's: scores in f32, the best experts first, their results added in
that order. It knows a layer's tensors and nothing of where experts lie.

Source: Shazeer et al. 2017; llama.cpp's llm_graph_context::build_moe_ffn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels import native
from engine.kernels.qmatmul import MatrixStack, gather_rows
from engine.model.context import Context, vector
from engine.model.expert_pool import EXPERT_LAYER, Brought
from engine.model.ffn import dense_ffn, gated
from engine.model.spec import Gating, MoeFfnSpec, RouterSpec
from engine.model.weights import LayerArrays

_LEAST_SUM = 2.0**-14  # the smallest normal number of float16, as in llama.cpp


def moe_ffn(context: Context, ffn: MoeFfnSpec, own: LayerArrays, x: jax.Array) -> jax.Array:
    """Returns the weighted sum of each token's experts, of f32 [N, width]."""
    ids, weights = _route(context, ffn.router, own, x)
    # Padding would ask for experts of its own: it goes where the first token goes.
    is_token = context.step.positions >= 0
    ids = jnp.where(is_token[:, None], ids, ids[jnp.argmax(is_token)])
    experts = _experts(context, own, ids)
    inputs = _products(context, ffn, own, ffn.inputs, x, ids, experts)
    if ffn.is_fused:
        gate, up = jnp.split(inputs[0], 2, axis=-1)
    else:
        gate, up = inputs
    hidden = gated(ffn.activation, gate, up).reshape(-1, ffn.hidden)
    (out,) = _products(
        context,
        ffn,
        own,
        ("ffn_down_exps",),
        hidden,
        ids.reshape(-1, 1),
        replace(experts, ids=experts.ids.reshape(-1, 1)),
    )
    out = out.reshape(*ids.shape, -1) * weights[..., None]
    total = out[:, 0]
    for k in range(1, ffn.router.num_used):
        total = total + out[:, k]
    if ffn.shared:
        shared = dense_ffn(context, ffn.shared, own, x, "_shexp")
        if ffn.has_shared_gate:
            gate = _row_sums(x * vector(own, "ffn_gate_inp_shexp.weight"))
            shared = shared * jax.nn.sigmoid(gate)
        total = total + shared
    return total


def _row_sums(x: jax.Array) -> jax.Array:
    """Sums of rows, f32 [N, 1], by halves: XLA's own order depends on the number of rows."""
    while (width := x.shape[-1]) > 1:
        x = jnp.pad(x, ((0, 0), (0, width % 2)))
        first, second = jnp.split(x, 2, axis=-1)
        x = first + second
    return x


def _experts(context: Context, own: LayerArrays, ids: jax.Array) -> Brought:
    view = context.weights.experts
    assert view is not None, "a layer with experts in a model without"
    return view.bring(vector(own, EXPERT_LAYER), ids)


def _products(
    context: Context,
    ffn: MoeFfnSpec,
    own: LayerArrays,
    names: tuple[str, ...],
    x: jax.Array,
    ids: jax.Array,
    experts: Brought,
) -> list[jax.Array]:
    """Products of each row with its experts, f32 [N, K, rows] each, adapted, biases added."""
    stacks = [cast(MatrixStack, own[name]) for name in names]
    products = experts.products(stacks, x, experts.ids)
    products = context.adapted_experts(names, x, ids, products)
    for i, name in enumerate(names):
        if name in ffn.biases:
            table = cast(MatrixStack, own[f"{name}.bias"])
            biases = gather_rows(context.weights.arena, table, ids.reshape(-1))
            products[i] = products[i] + biases.reshape(products[i].shape)
    return products


def _route(
    context: Context, router: RouterSpec, own: LayerArrays, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each token's experts, int32 [N, K], and their weights, f32 [N, K]."""
    biases = frozenset({"ffn_gate_inp"} if router.has_bias else ())
    logits = context.linear(own, "ffn_gate_inp", x, biases)
    bias = vector(own, "exp_probs_b.bias") if router.has_selection_bias else None
    if not context.weights.is_native:
        return route(router, logits, bias)
    return native.route(
        logits,
        bias,
        num_used=router.num_used,
        gating=router.gating.value,
        normalises=router.normalises,
        scale=router.scale,
        num_groups=router.num_groups,
        num_groups_used=router.num_groups_used,
    )


def route(
    router: RouterSpec, logits: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by logits f32 [N, experts]; `bias` f32 [experts] counts for the choice alone.

    Returns:
        ids int32 [N, num_used], the best first, and weights f32 [N, num_used].
    """
    scores = logits
    if router.gating is Gating.SOFTMAX:
        scores = jax.nn.softmax(logits, axis=-1)
    elif router.gating is Gating.SIGMOID:
        scores = jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if router.num_groups > 1:
        choice = _of_best_groups(router, choice)
    _, ids = lax.top_k(choice, router.num_used)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if router.gating is Gating.CHOSEN_SOFTMAX:
        weights = jax.nn.softmax(weights, axis=-1)
    if router.normalises:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _LEAST_SUM)
    return ids.astype(jnp.int32), weights * router.scale


def _of_best_groups(router: RouterSpec, choice: jax.Array) -> jax.Array:
    """Scores with those of all other groups at minus infinity."""
    grouped = choice.reshape(choice.shape[0], router.num_groups, -1)
    sums = lax.top_k(grouped, 2)[0].sum(-1)
    _, best = lax.top_k(sums, router.num_groups_used)
    takes_part = jax.nn.one_hot(best, router.num_groups, dtype=jnp.bool_).any(1)
    return jnp.where(takes_part[..., None], grouped, -jnp.inf).reshape(choice.shape)

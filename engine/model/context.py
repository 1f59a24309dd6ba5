"""What every block of a step shares: the tokens, the weights, and products with those weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels import native
from engine.kernels.expert_adapters import adapt_experts
from engine.kernels.lora import AdapterLists, Bank, Changes
from engine.kernels.qmatmul import MatrixStack, qmatmuls
from engine.model.rope import angles
from engine.model.spec import ModelSpec
from engine.model.weights import LayerArrays, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Where each token goes and what each row may read; all int32.

    The K kinds of pool are full (0) and, in models that have it, window (1). `tokens`, `positions`
    and `offsets` are [N], `pages` is [K, N] (padding: token 0, position -1, page 0). `tables` is
    [K, R, W] for D decode rows and, last, the chunk, `states` [R] the state of each row (padding:
    0). `outputs` [R] indexes the tokens whose logits are wanted, in the order of rows;
    `wants_logits` is a scalar, 0 if none are. `adapters` is None in programs without them.
    """

    tokens: jax.Array
    positions: jax.Array
    offsets: jax.Array
    pages: jax.Array
    tables: jax.Array
    states: jax.Array
    outputs: jax.Array
    wants_logits: jax.Array
    adapters: AdapterLists | None = None


@dataclass(frozen=True, kw_only=True)
class Products:
    """What every block needs of a model: its norms, and products with its weights.

    `banks` are the adapters' of the layer that runs, `layer` its place in them; `adapters` lists
    those of each of `num_decodes` rows of one token and of the chunk, None in programs without.
    `live` int32 [N] is negative for tokens that are padding; None: there is none.
    """

    spec: ModelSpec
    weights: Weights
    live: jax.Array | None = None
    num_decodes: int = 0
    adapters: AdapterLists | None = None
    banks: Mapping[str, Bank] = field(default_factory=dict[str, Bank])
    layer: jax.Array | int = 0

    def norm(self, x: jax.Array, weight: jax.Array, epsilon: float | None = None) -> jax.Array:
        """Root-mean-square norm over the last axis, with the model's epsilon unless given.

        Source: Zhang and Sennrich 2019.
        """
        epsilon = self.spec.norm_eps if epsilon is None else epsilon
        if self.weights.is_native:
            return native.norm(x, weight, epsilon)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + epsilon) * weight

    def layer_norm(self, x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        """Layer norm over the last axis.

        Source: Ba et al. 2016: the root-mean-square norm of what is left without the mean.
        """
        return self.norm(x - jnp.mean(x, axis=-1, keepdims=True), weight) + bias

    def linear(
        self, own: LayerArrays, name: str, x: jax.Array, biases: frozenset[str] = frozenset()
    ) -> jax.Array:
        """The projection of f32 [N, cols] by a layer's matrix; see `linears`."""
        return self.linears(own, (name,), x, biases)[0]

    def linears(
        self,
        own: LayerArrays,
        names: tuple[str, ...],
        x: jax.Array,
        biases: frozenset[str] = frozenset(),
        *,
        is_fine: bool = False,
    ) -> list[jax.Array]:
        """Projections of one input, f32 [N, rows] each; matrices in `biases` add theirs.

        `is_fine`: see `qmatmuls`.
        """
        matrices = [cast(MatrixStack, own[name]) for name in names]
        changes = self.changes(names)
        products = qmatmuls(
            self.weights.arena, matrices, x, live=self.live, is_fine=is_fine, changes=changes
        )
        return [
            y + vector(own, f"{name}.bias") if name in biases else y
            for name, y in zip(names, products, strict=True)
        ]

    def changes(self, names: Sequence[str]) -> Changes | None:
        """What the step's adapters change of products with the weights of these names."""
        if self.adapters is None:
            return None
        banks = [self.banks.get(name) for name in names]
        return Changes(banks, self.layer, self.adapters, self.num_decodes)


@dataclass(frozen=True, kw_only=True)
class Context(Products):
    """A step in a model. `turns` are cos and sin, f32 [ropes, N, dims // 2]."""

    step: StepInputs
    turns: tuple[jax.Array, jax.Array]

    def adapted_experts(
        self, names: Sequence[str], x: jax.Array, ids: jax.Array, products: list[jax.Array]
    ) -> list[jax.Array]:
        """Adds the step's adapters to products f32 [M, K, rows] of experts `ids` int32 [M, K].

        `x` is f32 [M, cols], as many rows for every token, in the order of tokens.
        """
        if self.step.adapters is None:
            return products
        banks = [self.banks.get(name) for name in names]
        lists = self.step.adapters.by_token(self.step.tokens.shape[0], self.num_decodes)
        return adapt_experts(banks, self.layer, lists, x, ids, products)


def vector(arrays: LayerArrays, name: str) -> jax.Array:
    """A vector of a layer, or of the model."""
    return cast(jax.Array, arrays[name])


def turns_of(
    spec: ModelSpec, weights: Weights, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every rope of the model at positions [N], f32 [ropes, N, dims // 2] each."""
    if not spec.ropes:
        nothing = jnp.zeros((0, len(positions), 0), jnp.float32)
        return nothing, nothing
    places = jnp.maximum(positions, 0)
    all_turns = [
        angles(rope, places, vector(weights.globals, rope.factors) if rope.factors else None)
        for rope in spec.ropes
    ]
    return jnp.stack([cos for cos, _ in all_turns]), jnp.stack([sin for _, sin in all_turns])

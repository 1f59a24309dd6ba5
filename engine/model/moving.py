"""Tokens moved to other positions: keys and values copied, keys turned by the difference.

A rotated key of position p is the key of position q turned by the angle of p - q, so a sequence
can lose tokens in its middle without being evaluated again. What the layers made of the lost tokens
stays in what follows them: that is the caller's to know. Compiled once, for a fixed number of
tokens; knows pages as numbers and no sequence.

Source: Su et al. 2021 (RoFormer), relative positions; llama.cpp's K-shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.kernels import flow
from engine.model.attention import KvPool
from engine.model.place import Place
from engine.model.rope import angles, rotate
from engine.model.spec import AttentionSpec, ModelSpec, RopeSpec
from engine.step import IntArray

_MOVED_TOKENS = 256  # per call


def can_move(spec: ModelSpec) -> bool:
    """Returns whether every layer keeps rotated keys of all tokens, whole heads of them."""
    mixers = (layer.block.mixer for layer in spec.layers)
    if spec.encoder or spec.num_window_layers or spec.num_recurrent_layers:
        return False
    return all(isinstance(mixer, AttentionSpec) for mixer in mixers)


class TokenMoves:
    """The program that moves tokens of the kv pool. The pool itself stays with the runner."""

    def __init__(
        self, spec: ModelSpec, factors: Sequence[jax.Array | None], places: Place, num_pages: int
    ) -> None:
        """`factors` are the frequency factors of each rope, f32 [dims // 2]; pages are usable ones.

        Raises:
            ValueError: tokens of this model cannot be moved.
        """
        if not can_move(spec):
            raise ValueError(f"tokens of {spec.architecture} cannot be moved")
        self._spec = spec
        self._factors = tuple(factors)
        self._layers = (places.first_unit, places.rope_id)
        self._num_pages = num_pages
        self._program: Any = None

    def compile(self, pool: KvPool) -> None:
        """What is left to do before the first call."""
        jitted = jax.jit(partial(_move, self._spec), donate_argnums=0)
        moves = jax.ShapeDtypeStruct((5, _MOVED_TOKENS), jnp.int32)
        self._program = jitted.lower(pool, self._layers, self._factors, moves).compile()

    def move(
        self,
        pool: KvPool,
        old_pages: Sequence[int],
        new_pages: Sequence[int],
        first: int,
        sources: Sequence[int],
    ) -> KvPool:
        """Returns the pool with tokens moved; it takes the given one.

        See `engine.step.PageStore.move_tokens`.
        """
        source = np.asarray(sources, np.int32)
        target = np.arange(first, first + len(source), dtype=np.int32)
        self._check(pool.page_tokens, old_pages, new_pages, source, target)
        old, new = np.asarray(old_pages, np.int32), np.asarray(new_pages, np.int32)
        page = pool.page_tokens
        rows = np.stack(
            [
                old[source // page],
                source % page,
                new[target // page],
                target % page,
                target - source,
            ]
        )
        for start in range(0, len(source), _MOVED_TOKENS):
            piece = np.zeros((5, _MOVED_TOKENS), np.int32)  # padding moves within the sink
            part = rows[:, start : start + _MOVED_TOKENS]
            piece[:, : part.shape[1]] = part
            pool = self._program(pool, self._layers, self._factors, piece)
        return pool

    def _check(
        self,
        page_tokens: int,
        old_pages: Sequence[int],
        new_pages: Sequence[int],
        source: IntArray,
        target: IntArray,
    ) -> None:
        """XLA clips a bad index silently, and what was overwritten could not be read any more."""
        for page_ids, positions in ((old_pages, source), (new_pages, target)):
            if page_ids and (min(page_ids) < 1 or max(page_ids) > self._num_pages):
                raise ValueError(
                    f"page ids {min(page_ids)}..{max(page_ids)} of a kv pool of {self._num_pages}"
                )
            end = len(page_ids) * page_tokens
            if positions.size and (positions.min() < 0 or positions.max() >= end):
                raise ValueError(f"positions {positions.min()}..{positions.max()} of {end}")
        if (source < target).any() or (np.diff(source) <= 0).any():
            raise ValueError("tokens are moved forward, or not in order")


def _move(
    spec: ModelSpec,
    pool: KvPool,
    layers: tuple[jax.Array, jax.Array],
    factors: tuple[jax.Array | None, ...],
    moves: jax.Array,
) -> KvPool:
    old_units, old_offsets, new_units, new_offsets, deltas = moves
    turns = [
        angles(_unit(rope), deltas, each) for rope, each in zip(spec.ropes, factors, strict=True)
    ]
    cos, sin = (jnp.stack(parts) for parts in zip(*turns, strict=True))

    def layer(pool: KvPool, place: tuple[jax.Array, jax.Array]) -> KvPool:
        first_unit, rope_id = place
        keys = pool.keys[old_units + first_unit, old_offsets]
        values = pool.values[old_units + first_unit, old_offsets]
        turned = rotate(spec.ropes[0].pairing, keys.astype(jnp.float32), cos[rope_id], sin[rope_id])
        # A token that stays keeps its very bits.
        keys = jnp.where((deltas == 0)[:, None, None], keys, turned.astype(keys.dtype))
        at = new_units + first_unit, new_offsets
        return KvPool(pool.keys.at[at].set(keys), pool.values.at[at].set(values))

    return flow.scan(layer, pool, layers)


def _unit(rope: RopeSpec) -> RopeSpec:
    """The rope without its magnitude, which the keys have already."""
    return replace(rope, magnitude=1.0)

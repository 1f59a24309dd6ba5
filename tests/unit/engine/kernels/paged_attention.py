"""Sequences in a paged pool, and what attention of their tokens must be: a softmax in float64.

Every unit that a step does not name is NaN, so that one read too many shows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from engine.kernels import native

UNLIMITED = 2**30
TABLE_TOKENS = 1280
# Keys that the kernel walks at a time, and those after which it starts anew.
BLOCK = 64
SPAN = 512

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """What is fixed of an attention.

    Values are as long as keys, or `value_dim`; with 0 the first `shared_dim` components of the keys
    are the values.
    """

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    page: int = 16
    dtype: str = "f2"
    scale: float = 0.3
    soft_cap: float = 0.0
    window: int = UNLIMITED
    value_dim: int | None = None
    shared_dim: int = 0
    has_sinks: bool = False

    @property
    def stored_dim(self) -> int:
        """Components of a value in the pool."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def mixed_dim(self) -> int:
        return self.stored_dim or self.shared_dim

    @property
    def sinks(self) -> Float32 | None:
        if not self.has_sinks:
            return None
        return np.linspace(-3, 4, self.num_heads, dtype=np.float32)


@dataclass
class Sequences:
    """Tokens at positions 0 .. length - 1 of several sequences: what attention is made of."""

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    queries: list[Float32] = field(init=False)
    keys: list[Float32] = field(init=False)
    values: list[Float32] = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        # Each sequence has its own numbers, whoever else is there.
        rngs = [np.random.default_rng([self.seed, n]) for n in self.lengths]

        def draw(num_heads: int, dim: int) -> list[Float32]:
            return [
                rng.standard_normal((n, num_heads, dim), np.float32)
                for n, rng in zip(self.lengths, rngs, strict=True)
            ]

        self.queries = draw(s.num_heads, s.head_dim)
        self.keys = draw(s.num_kv_heads, s.head_dim)
        self.values = draw(s.num_kv_heads, s.stored_dim)

    def expected(self, row: int, position: int) -> npt.NDArray[np.float64]:
        """One token by the definition, [num_heads, mixed_dim]."""
        s = self.shape
        if position < 0:
            return np.zeros((s.num_heads, s.mixed_dim))
        seen = slice(max(0, position - s.window + 1), position + 1)
        group = s.num_heads // s.num_kv_heads
        keys, values = (
            x[row][seen].astype(s.dtype).astype(np.float64).repeat(group, axis=1)
            for x in (self.keys, self.values if s.stored_dim else self.keys)
        )
        values = values[..., : s.mixed_dim]
        query = self.queries[row][position].astype(np.float64)
        scores = np.einsum("hd,shd->hs", query, keys) * np.float64(np.float32(s.scale))
        if s.soft_cap:
            scores = s.soft_cap * np.tanh(scores / s.soft_cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        if s.sinks is not None:
            total = total + np.exp(s.sinks[:, None] - scores.max(-1, keepdims=True))
        return np.einsum("hs,shd->hd", weights / total, values)


class Paged:
    """A pool with sequences in pages in random order; all else, the sink included, is NaN."""

    def __init__(self, sequences: Sequences, seed: int = 1) -> None:
        self.sequences, s = sequences, sequences.shape
        self.pages = [-(-n // s.page) for n in sequences.lengths]
        num_units = 1 + sum(self.pages) + 3
        order = iter(np.random.default_rng(seed).permutation(np.arange(1, num_units)))
        self.tables = np.zeros((len(self.pages), TABLE_TOKENS // s.page), np.int32)
        for row, count in enumerate(self.pages):
            self.tables[row, :count] = [next(order) for _ in range(count)]
        lead = (num_units, s.page, s.num_kv_heads)
        self.keys = np.full((*lead, s.head_dim), np.nan, s.dtype)
        self.values = np.full((*lead, s.stored_dim), np.nan, s.dtype)

    def place(self, row: int, position: int) -> tuple[int, int]:
        page = self.sequences.shape.page
        return int(self.tables[row, position // page]), position % page

    def fill(self, row: int, end: int) -> None:
        """Puts the keys and values of positions below `end` where steps would have put them."""
        for position in range(end):
            place = self.place(row, position)
            self.keys[place] = self.sequences.keys[row][position]
            self.values[place] = self.sequences.values[row][position]

    def step(
        self, decodes: Sequence[tuple[int, int]], chunk: tuple[int, Sequence[int]] | None = None
    ) -> Float32:
        """Runs a step: decode rows as (row, position), a chunk as (row, positions); -1 is padding.

        Keeps the pool that comes back; returns [tokens, num_heads, mixed_dim].
        """
        tokens = [*decodes]
        rows = [row for row, _ in decodes]
        if chunk is not None:
            tokens += [(chunk[0], position) for position in chunk[1]]
            rows.append(chunk[0])
        positions = np.array([position for _, position in tokens], np.int32)
        places = [self.place(r, p) if p >= 0 else (0, 0) for r, p in tokens]
        units, offsets = np.array(places, np.int32).reshape(-1, 2).T
        s = self.sequences
        queries, keys, values = (
            np.stack([x[row][max(position, 0)] for row, position in tokens])
            for x in (s.queries, s.keys, s.values)
        )
        out, new_keys, new_values = attend(
            s.shape,
            len(decodes),
            jnp.asarray(self.keys),
            jnp.asarray(self.values),
            (queries, keys, values, positions, units, offsets, self.tables[rows]),
        )
        self.keys, self.values = np.array(new_keys), np.array(new_values)
        return np.asarray(out)


def attend(
    shape: Shape, num_decodes: int, keys: jax.Array, values: jax.Array, step: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    run = program(shape.scale, shape.soft_cap, shape.mixed_dim, num_decodes)
    return run((keys, values), *step, np.int32(shape.window), shape.sinks)


@functools.cache
def program(scale: float, soft_cap: float, mixed_dim: int, num_decodes: int) -> Any:
    """One compiled call per set of static numbers, that owns the pool as the runner's does."""
    call = functools.partial(
        native.attend,
        mixed_dim=mixed_dim,
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
    )
    return jax.jit(call, donate_argnums=0)


def assert_close(paged: Paged, result: Float32, tokens: Sequence[tuple[int, int]]) -> None:
    assert len(result) == len(tokens)
    for found, (row, position) in zip(result, tokens, strict=True):
        expected = paged.sequences.expected(row, position)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


def vars_of(sequences: Sequences) -> tuple[list[Float32], list[Float32], list[Float32]]:
    return sequences.queries, sequences.keys, sequences.values


SPANS = [SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 70]
VARIANTS = [
    Shape(has_sinks=True),
    Shape(has_sinks=True, window=40, dtype="f4", head_dim=24),
    Shape(head_dim=24, value_dim=12),
    Shape(head_dim=12, value_dim=40, dtype="f4"),
    # Latent attention: one key per token, which is its value too.
    Shape(num_heads=20, num_kv_heads=1, head_dim=40, value_dim=0, shared_dim=32),
    Shape(num_heads=5, num_kv_heads=1, head_dim=27, value_dim=0, shared_dim=9, has_sinks=True),
]

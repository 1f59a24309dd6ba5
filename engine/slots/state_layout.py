"""How a slot's state lies in a file: which tensors, of which tokens, whatever the page size.

Keys and values are cut into pieces of `PIECE_TOKENS` tokens, so that a file is written, read and
hashed without ever holding all of it; each piece has the canonical axes [layer, token, kv_head,
dim]. Layers that see everything are kept whole, sliding-window layers in the spans that are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.step import PageLayout
from engine.types import PoolKind

PIECE_TOKENS = 256
_DTYPES = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4")}


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one pool: per layer and token, key_heads x key_dim and value_heads x value_dim."""

    num_layers: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int


@dataclass(frozen=True)
class StateLayout:
    """What a model keeps of each token.

    `window` are its sliding-window layers, None if it has none; of them the last `window_tokens`
    tokens are needed. `kv_type` is "f16" or "f32".
    """

    full: LayerGroup
    window: LayerGroup | None
    window_tokens: int
    kv_type: str

    @classmethod
    def of(cls, full: PageLayout, window: PageLayout | None, window_tokens: int) -> StateLayout:
        """Describes the pools of a runner."""
        kv_type = next(name for name, dtype in _DTYPES.items() if dtype == full.dtype)
        return cls(
            full=_group(full),
            window=None if window is None else _group(window),
            window_tokens=window_tokens,
            kv_type=kv_type,
        )

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """The type of every key and value."""
        return _DTYPES[self.kv_type]

    def group(self, kind: PoolKind) -> LayerGroup:
        """The layers of a pool that the state has."""
        group = self.full if kind is PoolKind.KV else self.window
        assert group is not None
        return group


@dataclass(frozen=True)
class Span:
    """Tokens `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens inside."""
        return self.end - self.start


@dataclass(frozen=True)
class WindowMark:
    """Sliding-window layers can continue the sequence at `lowest` to `position` tokens."""

    lowest: int
    position: int

    def span(self, window_tokens: int) -> Span:
        """The tokens whose keys and values that takes."""
        return Span(max(0, self.lowest - window_tokens + 1), self.position)


@dataclass(frozen=True)
class Piece:
    """The keys and values of consecutive tokens in the layers of one pool."""

    kind: PoolKind
    span: Span

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two tensors."""
        prefix = f"{self.kind.value}.{self.span.start:08d}"
        return f"{prefix}.keys", f"{prefix}.values"

    def shapes(self, layout: StateLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two tensors, [layer, token, kv_head, dim]."""
        group, num_tokens = layout.group(self.kind), self.span.num_tokens
        return (
            (group.num_layers, num_tokens, group.key_heads, group.key_dim),
            (group.num_layers, num_tokens, group.value_heads, group.value_dim),
        )


def pieces_of(
    layout: StateLayout, num_tokens: int, marks: Sequence[WindowMark]
) -> tuple[Piece, ...]:
    """Returns the pieces of a state, in the order in which a file has them."""
    spans = [(PoolKind.KV, Span(0, num_tokens))] if layout.full.num_layers else []
    windows = _union(mark.span(layout.window_tokens) for mark in marks)
    spans += [(PoolKind.SWA, span) for span in windows]
    return tuple(Piece(kind, cut) for kind, span in spans for cut in _cuts(span))


def are_marks(marks: Sequence[WindowMark], num_tokens: int) -> bool:
    """Whether marks rise and lie inside so many tokens."""
    return all(1 <= mark.lowest <= mark.position <= num_tokens for mark in marks) and all(
        before.position < after.position for before, after in pairwise(marks)
    )


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same tokens in spans that rise and do not touch."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def _cuts(span: Span) -> Iterator[Span]:
    """Cuts at multiples of the piece, which every page size divides."""
    start = span.start
    while start < span.end:
        end = min(span.end, (start // PIECE_TOKENS + 1) * PIECE_TOKENS)
        yield Span(start, end)
        start = end


def _group(layout: PageLayout) -> LayerGroup:
    return LayerGroup(layout.num_layers, *layout.key_shape, *layout.value_shape)

"""How a slot's state lies in a file: which tensors, of which tokens, whatever the page size.

Keys and values are cut into pieces of `PIECE_TOKENS` tokens, so that a file is written, read and
hashed without ever holding all of it; each piece has the canonical axes [layer, token, kv_head,
dim]. Layers that see everything are kept whole, sliding-window layers in the spans that are held,
recurrent layers as one state for each position at which they can go on, behind all else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.step import PageContent, PageLayout, StateContent
from engine.step import StateLayout as RecurrentLayout
from engine.types import PoolKind

PIECE_TOKENS = 256
# More than a save keeps; what a reader holds of a file at once is bounded by it.
MAX_MARKS = 16
_STATE_DTYPE = np.dtype("<f4")
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
    tokens are needed. `kv_type` is "f16" or "f32". `recurrent` is the state of its recurrent layers,
    None if it has none.
    """

    full: LayerGroup
    window: LayerGroup | None
    window_tokens: int
    kv_type: str
    recurrent: RecurrentLayout | None = None

    @classmethod
    def of(
        cls,
        full: PageLayout,
        window: PageLayout | None,
        window_tokens: int,
        recurrent: RecurrentLayout | None = None,
    ) -> StateLayout:
        """Describes the pools of a runner."""
        kv_type = next(name for name, dtype in _DTYPES.items() if dtype == full.dtype)
        return cls(
            full=_group(full),
            window=None if window is None else _group(window),
            window_tokens=window_tokens,
            kv_type=kv_type,
            recurrent=recurrent,
        )

    @property
    def has_marks(self) -> bool:
        """Whether pages alone do not say where a sequence can be continued."""
        return self.window is not None or self.recurrent is not None

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
class Mark:
    """Layers with a window or a state can continue the sequence at `lowest` to `position` tokens.

    A state does so at `position` alone.
    """

    lowest: int
    position: int

    def span(self, window_tokens: int) -> Span:
        """The tokens whose keys and values that takes in sliding-window layers."""
        return Span(max(0, self.lowest - window_tokens + 1), self.position)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class PagePiece:
    """The keys and values of consecutive tokens in the layers of one pool."""

    kind: PoolKind
    span: Span

    def tensors(self, layout: StateLayout) -> tuple[Tensor, ...]:
        """Its keys and its values, [layer, token, kv_head, dim]."""
        group, prefix = layout.group(self.kind), f"{self.kind.value}.{self.span.start:08d}"
        sides = (group.num_layers, self.span.num_tokens)
        return (
            Tensor(f"{prefix}.keys", layout.dtype, (*sides, group.key_heads, group.key_dim)),
            Tensor(f"{prefix}.values", layout.dtype, (*sides, group.value_heads, group.value_dim)),
        )


@dataclass(frozen=True)
class StatePiece:
    """The state of the recurrent layers after the first `position` tokens."""

    position: int

    def tensors(self, layout: StateLayout) -> tuple[Tensor, ...]:
        """The inputs of its convolutions and, where the model has one, its matrix."""
        state = layout.recurrent
        assert state is not None
        prefix = f"{PoolKind.MAMBA.value}.{self.position:08d}"
        conv = Tensor(f"{prefix}.conv", _STATE_DTYPE, (state.num_layers, *state.conv))
        if state.matrix is None:
            return (conv,)
        matrix = (state.num_layers, *state.matrix)
        return (conv, Tensor(f"{prefix}.matrix", _STATE_DTYPE, matrix))


Piece: TypeAlias = PagePiece | StatePiece
Content: TypeAlias = PageContent | StateContent


def arrays_of(content: Content) -> tuple[npt.NDArray[Any], ...]:
    """Returns the arrays of a piece's content, in the order of its tensors."""
    if isinstance(content, PageContent):
        return content.keys, content.values
    return (content.conv,) if content.matrix is None else (content.conv, content.matrix)


def content_of(piece: Piece, arrays: Sequence[npt.NDArray[Any]]) -> Content:
    """Returns the content that consists of arrays in the order of its piece's tensors."""
    if isinstance(piece, PagePiece):
        keys, values = arrays
        return PageContent(keys, values)
    return StateContent(arrays[0], arrays[1] if len(arrays) > 1 else None)


def pieces_of(layout: StateLayout, num_tokens: int, marks: Sequence[Mark]) -> tuple[Piece, ...]:
    """Returns the pieces of a state, in the order in which a file has them."""
    spans = [(PoolKind.KV, Span(0, num_tokens))] if layout.full.num_layers else []
    if layout.window is not None:
        windows = _union(mark.span(layout.window_tokens) for mark in marks)
        spans += [(PoolKind.SWA, span) for span in windows]
    pages = (PagePiece(kind, cut) for kind, span in spans for cut in _cuts(span))
    states = marks if layout.recurrent is not None else ()
    return (*pages, *(StatePiece(mark.position) for mark in states))


def are_marks(layout: StateLayout, marks: Sequence[Mark], num_tokens: int) -> bool:
    """Whether marks are those of a sequence: they rise, and the last one is its very end."""
    if not layout.has_marks or not num_tokens:
        return not marks
    return (
        1 <= len(marks) <= MAX_MARKS
        and all(1 <= mark.lowest <= mark.position for mark in marks)
        and all(before.position < after.position for before, after in pairwise(marks))
        and marks[-1].position == num_tokens
        and (layout.recurrent is None or all(mark.lowest == mark.position for mark in marks))
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

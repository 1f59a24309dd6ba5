"""The tokens still in play for one row, and how they are ordered.

Samplers map one `Candidates` to the next. Nothing here knows a parameter or a generator.

A set may be *partial*: the best logits of the row and those that an edit touches, with
`unseen_max` as a bound on all the others. Orders of equal logits are by position, which is by
rising id in every set that comes from a row (C++'s unstable sorts leave that open).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sampling.float32 import expf, sum_in_order
from engine.step import FloatArray, IntArray, RowLogits

Index = npt.NDArray[np.intp]

# Below this many values a comparison sort of floats beats building integer keys.
_KEY_SORT_MIN = 1024


@dataclass(frozen=True)
class Candidates:
    """Token ids and their logits after the samplers so far, int32 and float32 of one length.

    `is_sorted` means "known to be sorted by falling logit", which is what a sampler acts on: a set
    can happen to be sorted without it. `in_id_order`: ids strictly rise. `unseen_max` None: no
    other token is in play; else every token that is not listed has at most this logit.
    """

    ids: IntArray
    logits: FloatArray
    is_sorted: bool = False
    in_id_order: bool = False
    unseen_max: np.float32 | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_partial(self) -> bool:
        """True while tokens outside the set are still in play."""
        return self.unseen_max is not None

    @property
    def num_clear(self) -> int:
        """How many of these are certainly above every token that is not listed."""
        if self.unseen_max is None:
            return len(self.ids)
        return int(np.count_nonzero(self.logits > self.unseen_max))

    def hides(self, logit: np.float32) -> bool:
        """Says whether a token that is not listed may reach this logit."""
        return self.unseen_max is not None and bool(self.unseen_max >= logit)

    def take(self, which: Index | npt.NDArray[np.bool_] | slice, *, is_sorted: bool) -> Candidates:
        """Returns the chosen ones, in that order, as all that is left."""
        in_id_order = self.in_id_order and isinstance(which, np.ndarray) and which.dtype == np.bool_
        return Candidates(self.ids[which], self.logits[which], is_sorted, in_id_order)

    def with_logits(self, logits: FloatArray, *, is_sorted: bool | None = None) -> Candidates:
        """Returns the same tokens with other logits; the bound on unseen ones stays."""
        keep = self.is_sorted if is_sorted is None else is_sorted
        return Candidates(self.ids, logits, keep, self.in_id_order, self.unseen_max)

    def find(self, token_ids: IntArray) -> tuple[Index, npt.NDArray[np.bool_]]:
        """Locates tokens: positions (only where found) and which were found."""
        order = None if self.in_id_order else np.argsort(self.ids)
        at = np.searchsorted(self.ids, token_ids, sorter=order)
        at = np.minimum(at, len(self.ids) - 1)
        if order is not None:
            at = order[at]
        found = self.ids[at] == token_ids
        return at[found], found

    def sorted(self) -> Candidates:
        """Returns the set sorted by falling logit."""
        if self.is_sorted:
            return self
        return self.take(descending(self.logits), is_sorted=True)


def whole(row: RowLogits) -> Candidates:
    """Returns every token of the row, in id order."""
    logits = row.full()
    return Candidates(np.arange(len(logits), dtype=np.int32), logits, in_id_order=True)


def gather(row: RowLogits, edited: IntArray) -> Candidates:
    """Returns the row's best tokens and the edited ones, raw, in id order.

    Args:
        row: The row.
        edited: Ids whose logits samplers may change; any order, repeats allowed.
    """
    ids, logits = row.top()
    if len(ids) >= row.vocab_size:
        return whole(row)
    unseen_max = logits[-1]
    extra = np.array(list(set(edited.tolist()).difference(ids.tolist())), np.int32)
    if len(extra):
        ids = np.concatenate([ids, extra])
        logits = np.concatenate([logits, row.at(extra)])
    order = np.argsort(ids)
    return Candidates(ids[order], logits[order], in_id_order=True, unseen_max=unseen_max)


def softmax(candidates: Candidates) -> FloatArray:
    """Returns the probabilities of a complete set, float32, in its order.

    Source: llama.cpp `llama_sampler_softmax_impl`, whose sum is a float loop and whose maximum is
    the first logit where the set counts as sorted.
    """
    logits = candidates.logits
    largest = logits[0] if candidates.is_sorted else logits.max()
    powers = expf(logits - largest)
    powers /= sum_in_order(powers)
    return powers


def descending(values: FloatArray) -> Index:
    """Returns the stable order by falling value; NaN goes anywhere."""
    if len(values) < _KEY_SORT_MIN:
        return np.argsort(-values, kind="stable")
    # Adding 0 turns -0.0 into 0.0, which compare equal and must get equal keys.
    bits = (values + np.float32(0)).view(np.int32)
    # Falling floats as rising unsigned integers; the position makes the sort stable.
    bits ^= ~(bits >> 31) & 0x7FFFFFFF
    keys = bits.view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(0xFFFFFFFF)
    return keys.view(np.intp)


def largest(values: FloatArray, count: int) -> Index:
    """Returns the first `count` of `descending(values)` without sorting the rest."""
    size = len(values)
    if size < _KEY_SORT_MIN or count * 4 >= size or not count:
        return descending(values)[:count]
    least = np.partition(values, size - count)[size - count]
    if np.isnan(least):
        return descending(values)[:count]
    above = np.flatnonzero(values > least)
    level = np.flatnonzero(values == least)[: count - len(above)]
    chosen = np.sort(np.concatenate([above, level]))
    return chosen[descending(values[chosen])]

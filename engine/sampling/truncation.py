"""Samplers that drop the unlikely: top_n_sigma, top_k, typ_p, top_p, min_p.

`min_keep` is the least number of candidates that a sampler leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from engine.sampling.candidates import Candidates, Index, descending, largest, softmax
from engine.sampling.float32 import (
    MAX,
    NEG_INF,
    log_scalar,
    logf,
    running_sum,
    sum_in_order,
)
from engine.sampling.stage import Stage
from engine.step import FloatArray

# Most nuclei are smaller than the first; sorting so few is cheaper than sorting everything.
_GUESSES = (256, 4096)
# libstdc++'s introsort leaves runs of this length to insertion sort.
_INSERTION_SORT_MAX = 16


@dataclass(frozen=True)
class TopNSigma(Stage):
    """Forbids logits more than n standard deviations below the largest.

    Source: llama.cpp `llama_sampler_top_n_sigma`; Tang et al., "Top-nsigma" (2024). The deviation
    is over finite logits.
    """

    n: np.float32

    def apply(self, candidates: Candidates) -> Candidates:
        """Keeps every candidate; the forbidden ones get -inf."""
        logits = candidates.logits
        finite = logits[logits != NEG_INF]
        if len(logits) <= 1 or not len(finite):
            return candidates
        count = np.float32(len(finite))
        mean = sum_in_order(finite) / count
        deviations = (finite - mean).astype(np.float64)
        spread = np.float32(np.sqrt(sum_in_order((deviations**2).astype(np.float32)) / count))
        least = finite.max() - self.n * spread
        return candidates.with_logits(np.where(logits < least, NEG_INF, logits))


@dataclass(frozen=True)
class TopK(Stage):
    """Keeps the k > 0 largest, sorted. Source: llama.cpp `llama_sampler_top_k_impl`."""

    k: int

    def admits(self, candidates: Candidates) -> bool:
        """A set that surely lists the k largest."""
        return self.k <= candidates.num_clear

    def apply(self, candidates: Candidates) -> Candidates:
        """Returns the k largest, or all if there are fewer."""
        if candidates.is_sorted:
            return candidates.take(slice(self.k), is_sorted=True)
        k = min(self.k, len(candidates))
        return candidates.take(largest(candidates.logits, k), is_sorted=True)


@dataclass(frozen=True)
class TypicalP(Stage):
    """Keeps the tokens whose surprise is closest to the entropy, until their mass exceeds p.

    Source: llama.cpp `llama_sampler_typical_apply`; Meister et al., "Locally Typical Sampling"
    (2022).
    """

    p: np.float32
    min_keep: int

    def apply(self, candidates: Candidates) -> Candidates:
        """Returns the typical ones, most typical first, not sorted by logit."""
        candidates = candidates.sorted()
        probs = softmax(candidates)
        logs = logf(probs)
        entropy = sum_in_order(-probs * logs)
        order = _by_typicality(np.abs(-logs - entropy))
        mass = running_sum(probs[order])
        stop = int(np.searchsorted(mass, self.p, side="right"))
        keep = max(stop, self.min_keep - 1) + 1
        return candidates.take(order[:keep], is_sorted=False)


def _by_typicality(scores: FloatArray) -> Index:
    # A probability of 0 makes llama.cpp's entropy NaN, and then no two scores compare.
    if np.isnan(scores[0]):
        return unordered_sort(len(scores))
    return descending(-scores)


@lru_cache(maxsize=64)
def unordered_sort(size: int) -> Index:
    """Returns the order that `std::sort` leaves when every comparison is false.

    Source: libstdc++ `std::__introsort_loop`: the middle element becomes the pivot, the partition
    swaps every pair of the rest end for end, and both halves go on until they are short enough for
    an insertion sort, which then moves nothing.
    """
    order = np.arange(size, dtype=np.intp)
    pending = [(0, size)]
    while pending:
        first, last = pending.pop()
        if last - first <= _INSERTION_SORT_MAX:
            continue
        middle = first + (last - first) // 2
        order[[first, middle]] = order[[middle, first]]
        order[first + 1 : last] = order[first + 1 : last][::-1].copy()
        cut = first + 1 + (last - first - 1) // 2
        pending += [(first, cut), (cut, last)]
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class TopP(Stage):
    """Keeps the likeliest until their mass reaches p, sorted.

    Source: llama.cpp `llama_sampler_top_p_apply`; Holtzman et al., "The Curious Case of Neural
    Text Degeneration" (2019).
    """

    p: np.float32
    min_keep: int

    def apply(self, candidates: Candidates) -> Candidates:
        """Returns the nucleus."""
        probs = softmax(candidates)
        if candidates.is_sorted:
            return candidates.take(slice(self._num_kept(probs)), is_sorted=True)
        for guess in _GUESSES:
            order = largest(candidates.logits, min(guess, len(candidates)))
            keep = self._num_kept(probs[order])
            if keep <= len(order):
                return candidates.take(order[:keep], is_sorted=True)
        order = descending(candidates.logits)
        return candidates.take(order[: self._num_kept(probs[order])], is_sorted=True)

    def _num_kept(self, probs: FloatArray) -> int:
        """How many of these are kept; more than there are if the mass is not reached."""
        mass = running_sum(probs)
        if np.isnan(mass[-1]):
            return len(probs) + 1
        return max(int(np.searchsorted(mass, self.p, side="left")) + 1, self.min_keep)


@dataclass(frozen=True)
class MinP(Stage):
    """Keeps the tokens with at least p > 0 times the largest probability.

    Source: llama.cpp `llama_sampler_min_p_apply`; Nguyen et al., "Min-p Sampling" (2024). On an
    unsorted set the order stays, unless fewer than min_keep would be left.
    """

    p: np.float32
    min_keep: int

    def admits(self, candidates: Candidates) -> bool:
        """A set that surely lists every token of that probability, and enough of them."""
        least = self._least(candidates)
        kept = np.count_nonzero(candidates.logits >= least)
        return bool(kept >= max(self.min_keep, 1)) and not candidates.hides(least)

    def apply(self, candidates: Candidates) -> Candidates:
        """Returns the likely ones."""
        if not candidates.is_sorted:
            keep = candidates.logits >= self._least(candidates)
            if np.count_nonzero(keep) >= max(self.min_keep, 1):
                return candidates.take(keep, is_sorted=False)
        candidates = candidates.sorted()
        below = candidates.logits[1:] < candidates.logits[0] + log_scalar(self.p)
        first = int(np.argmax(below)) if below.any() else len(below)
        return candidates.take(slice(max(first + 1, self.min_keep)), is_sorted=True)

    def _least(self, candidates: Candidates) -> np.float32:
        return max(candidates.logits.max(), np.float32(-MAX)) + log_scalar(self.p)

"""Temperature: fixed, zero (the best token only), and adapted to the entropy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.sampling.candidates import Candidates, softmax
from engine.sampling.float32 import NEG_INF, log_scalar, logf, sum_in_order
from engine.sampling.stage import Stage

_ONE = np.float32(1)


@dataclass(frozen=True)
class Temperature(Stage):
    """Divides the logits; at 0 or below only the first largest stays possible.

    Source: llama.cpp `llama_sampler_temp_impl`.
    """

    temperature: np.float32

    def admits(self, candidates: Candidates) -> bool:
        """Any set if it only divides; else one that surely lists the largest."""
        return bool(self.temperature > 0) or candidates.num_clear > 0

    def apply(self, candidates: Candidates) -> Candidates:
        """Divides the logits, and the bound on the unseen ones with them."""
        if self.temperature <= 0:
            return _only_best(candidates)
        unseen = candidates.unseen_max
        return Candidates(
            candidates.ids,
            candidates.logits / self.temperature,
            candidates.is_sorted,
            candidates.in_id_order,
            None if unseen is None else unseen / self.temperature,
        )


def _only_best(candidates: Candidates) -> Candidates:
    best = int(np.argmax(candidates.logits))
    logits = np.full(len(candidates), NEG_INF)
    logits[best] = candidates.logits[best]
    unseen = NEG_INF if candidates.is_partial else None
    return Candidates(candidates.ids, logits, candidates.is_sorted, candidates.in_id_order, unseen)


@dataclass(frozen=True)
class DynamicTemperature(Stage):
    """Chooses the temperature from `temperature` +- `range_` > 0 by the normalised entropy.

    Source: llama.cpp `llama_sampler_temp_ext_apply`: `low + (high - low) * (H / ln n)**exponent`,
    low not below 0.
    """

    temperature: np.float32
    range_: np.float32
    exponent: np.float32

    def apply(self, candidates: Candidates) -> Candidates:
        """Sorts the set and divides the logits."""
        if len(candidates) <= 1:
            return candidates
        candidates = candidates.sorted()
        return Temperature(self._adapted(candidates)).apply(candidates)

    def _adapted(self, candidates: Candidates) -> np.float32:
        probs = softmax(candidates)
        possible = probs[probs > 0]
        entropy = sum_in_order(-(possible * logf(possible)))
        most = -log_scalar(_ONE / np.float32(len(candidates)))
        low = max(np.float32(0), self.temperature - self.range_)
        high = self.temperature + self.range_
        # Double, so that the power is rounded once, as powf does.
        share = np.float64(entropy / most)
        return low + (high - low) * np.float32(share ** np.float64(self.exponent))

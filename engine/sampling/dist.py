"""The categorical draw that ends a chain, and the one that mirostat and adaptive_p use."""

from __future__ import annotations

import numpy as np

from engine.sampling.candidates import Candidates
from engine.sampling.float32 import NEG_INF, expf, running_sum_double
from engine.sampling.mt19937 import Mt19937
from engine.sampling.stage import Pick, Picker
from engine.step import FloatArray


class Dist(Picker):
    """Draws from the softmax of the candidates, walking them in their order.

    One double is drawn per token, also when only one candidate is left.

    Source: llama.cpp `llama_sampler_dist_apply`.
    """

    def __init__(self, seed: int) -> None:
        self._generator = Mt19937(seed)

    def admits(self, candidates: Candidates) -> bool:
        """Where every token that is not listed is forbidden."""
        return candidates.unseen_max == NEG_INF

    def pick(self, candidates: Candidates) -> Pick:
        """Takes the first candidate at which the running mass reaches the draw."""
        uniform = self._generator.next_double()
        if len(candidates) == 1:
            return Pick(candidates, np.ones(1, np.float32), 0)
        logits = candidates.logits
        largest = logits[0] if candidates.is_sorted else logits.max()
        powers = expf(logits - largest)
        mass = running_sum_double(powers)
        probs = (powers / mass[-1]).astype(np.float32)
        return Pick(candidates, probs, _first_reaching(mass, mass[-1] * uniform))


def _first_reaching(mass: np.ndarray[tuple[int], np.dtype[np.float64]], target: np.float64) -> int:
    # Nothing reaches a NaN (every logit was forbidden); the walk then ends on the last one.
    if np.isnan(target):
        return len(mass) - 1
    return int(np.searchsorted(mass, target, side="left"))


def draw_discrete(probs: FloatArray, generator: Mt19937) -> int:
    """Draws an index by weight; a single weight draws nothing from the generator.

    Source: libstdc++ `std::discrete_distribution`, which normalises in double and forces the last
    partial sum to 1.
    """
    if len(probs) < 2:
        return 0
    weights = probs.astype(np.float64)
    steps = running_sum_double(weights / running_sum_double(weights)[-1])
    steps[-1] = 1.0
    uniform = generator.next_double()
    # A lower bound over NaN steps compares false everywhere and stays at the first.
    if np.isnan(steps[0]):
        return 0
    return int(np.searchsorted(steps, uniform, side="left"))

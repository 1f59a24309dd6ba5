"""adaptive_p: prefers tokens whose probability is near a target that follows what was picked."""

from __future__ import annotations

import numpy as np

from engine.sampling.candidates import Candidates, softmax
from engine.sampling.dist import draw_discrete
from engine.sampling.float32 import NEG_INF
from engine.sampling.mt19937 import Mt19937
from engine.sampling.stage import Pick, Picker
from engine.step import FloatArray

_INVERSE_WIDTH = np.float32(1) / np.float32(0.3)
_PEAK = np.float32(5)
_SHARPNESS = np.float32(10)
_ONE = np.float32(1)
_TWO = np.float32(2)


class AdaptiveP(Picker):
    """Ends a chain in the place of `Dist`; a negative target only draws.

    `decay` in 0 .. 0.99 weighs the history of picked probabilities.

    Source: llama.cpp `llama_sampler_adaptive_p_apply`.
    """

    def __init__(self, *, target: float, decay: float, seed: int) -> None:
        self._target = np.float32(target)
        self._decay = min(max(np.float32(decay), np.float32(0)), np.float32(0.99))
        self._generator = Mt19937(seed)
        self._weighted = self._target / (_ONE - self._decay)
        self._weight = _ONE / (_ONE - self._decay)
        self._pending: tuple[int, np.float32] | None = None

    def pick(self, candidates: Candidates) -> Pick:
        """Draws by weight, near the target or (a negative one) by probability alone."""
        original = softmax(candidates)
        if self._target < 0:
            return Pick(candidates, original, draw_discrete(original, self._generator))
        candidates = candidates.with_logits(self._transformed(candidates.logits, original))
        probs = softmax(candidates)
        selected = draw_discrete(probs, self._generator)
        pick = Pick(candidates, probs, selected)
        self._pending = (pick.token_id, original[selected])
        return pick

    def accept(self, token_id: int) -> None:
        """Lets the target follow the probability that the picked token had."""
        if self._pending and self._pending[0] == token_id:
            self._weighted = self._pending[1] + self._decay * self._weighted
            self._weight = _ONE + self._decay * self._weight
        self._pending = None

    def _transformed(self, logits: FloatArray, probs: FloatArray) -> FloatArray:
        target = min(self._target, _ONE)
        adapted = _TWO * target - self._weighted / self._weight
        adapted = min(max(adapted, np.float32(0)), _ONE)
        distance = np.abs((probs - adapted) * _INVERSE_WIDTH)
        shaped = _PEAK - _SHARPNESS * distance * distance / (_ONE + distance)
        return np.where(logits == NEG_INF, NEG_INF, shaped)

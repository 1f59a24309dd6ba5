"""Mirostat 1 and 2: truncation that steers the surprise of the text towards tau bits.

Source: Basu et al., "Mirostat" (2020); llama.cpp `llama_sampler_mirostat_apply`, `_v2_apply`.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.candidates import Candidates, softmax
from engine.sampling.dist import draw_discrete
from engine.sampling.float32 import logf, sum_in_order
from engine.sampling.mt19937 import Mt19937
from engine.sampling.stage import Pick, Picker
from engine.step import FloatArray

# The Zipf exponent is estimated from this many of the likeliest tokens.
_ESTIMATE_FROM = 100
_INT32_MAX = 2**31 - 1
_ONE = np.float32(1)


def _power(base: np.float32, exponent: np.float32) -> np.float32:
    return np.float32(np.float64(base) ** np.float64(exponent))


def _surprise(probs: FloatArray) -> FloatArray:
    """Returns -log2 p, rounded once to float32."""
    return -np.log2(probs, dtype=np.float64).astype(np.float32)


class _Feedback:
    """The controller: mu follows the observed surprise at rate eta."""

    def __init__(self, *, tau: float, eta: float, seed: int) -> None:
        self._tau = np.float32(tau)
        self._eta = np.float32(eta)
        self._generator = Mt19937(seed)
        self.mu = np.float32(2) * self._tau

    def draw(self, candidates: Candidates) -> Pick:
        """Draws from sorted candidates and updates mu."""
        probs = softmax(candidates)
        selected = draw_discrete(probs, self._generator)
        error = _surprise(probs[selected : selected + 1])[0] - self._tau
        self.mu = self.mu - self._eta * error
        return Pick(candidates, probs, selected)


class MirostatV1(Picker):
    """Keeps k tokens, k from mu and a Zipf fit of the likeliest."""

    def __init__(self, *, vocab_size: int, tau: float, eta: float, seed: int) -> None:
        self._vocab_size = np.float32(vocab_size)
        self._feedback = _Feedback(tau=tau, eta=eta, seed=seed)
        ranks = np.arange(1, _ESTIMATE_FROM, dtype=np.float32)
        self._steps = logf((ranks + _ONE) / ranks)

    def pick(self, candidates: Candidates) -> Pick:
        """Truncates, draws by weight and updates mu."""
        candidates = candidates.sorted()
        k = self._num_kept(softmax(candidates))
        return self._feedback.draw(candidates.take(slice(k), is_sorted=True))

    def _num_kept(self, probs: FloatArray) -> int:
        head = probs[:_ESTIMATE_FROM]
        ratios = logf(head[:-1] / head[1:])
        steps = self._steps[: len(ratios)]
        s_hat = sum_in_order(steps * ratios) / sum_in_order(steps * steps)
        epsilon = s_hat - _ONE
        above = epsilon * _power(np.float32(2), self._feedback.mu)
        below = _ONE - _power(self._vocab_size, -epsilon)
        k = float(_power(above / below, _ONE / s_hat))
        # C's conversion of NaN and of what does not fit gives the least int, which is then 1.
        return max(int(k), 1) if abs(k) <= _INT32_MAX else 1


class MirostatV2(Picker):
    """Drops every token that would surprise by more than mu bits, but for the likeliest."""

    def __init__(self, *, tau: float, eta: float, seed: int) -> None:
        self._feedback = _Feedback(tau=tau, eta=eta, seed=seed)

    def pick(self, candidates: Candidates) -> Pick:
        """Truncates, draws by weight and updates mu."""
        candidates = candidates.sorted()
        surprising = _surprise(softmax(candidates)) > self._feedback.mu
        k = int(np.argmax(surprising)) if surprising.any() else len(surprising)
        return self._feedback.draw(candidates.take(slice(max(k, 1)), is_sorted=True))

"""Edits of known tokens: logit bias, and the repetition, frequency and presence penalties."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from engine.sampling.candidates import Candidates
from engine.sampling.stage import Edit
from engine.step import IntArray


class LogitBias(Edit):
    """Adds a bias to some logits; -inf forbids a token.

    Source: llama.cpp `llama_sampler_logit_bias`; a token that is named twice gets both.
    """

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        self._ids = np.array([token_id for token_id, _ in pairs], dtype=np.int32)
        self._bias = np.array([bias for _, bias in pairs], dtype=np.float32)

    @property
    def only_forbids(self) -> bool:
        """True if no bias does anything but forbid its token."""
        return bool(np.isneginf(self._bias).all())

    def token_ids(self) -> IntArray:
        """The biased tokens."""
        return self._ids

    def apply(self, candidates: Candidates) -> Candidates:
        """Adds the biases."""
        at, found = candidates.find(self._ids)
        logits = candidates.logits.copy()
        np.add.at(logits, at, self._bias[found])
        return candidates.with_logits(logits)


class Penalties(Edit):
    """Makes the tokens of the recent past less likely; the prompt counts.

    `last_n` > 0 is the window in tokens. With count c in the window a logit x becomes x / repeat
    (x > 0) or x * repeat, minus c * frequency + presence.

    Source: llama.cpp `llama_sampler_penalties`; Keskar et al., "CTRL" (2019), section 4.1.
    """

    def __init__(
        self,
        *,
        last_n: int,
        repeat: float,
        frequency: float,
        presence: float,
        prompt: Sequence[int],
    ) -> None:
        self._repeat = np.float32(repeat)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        self._window = deque(prompt[-last_n:], maxlen=last_n)
        self._counts = Counter(self._window)

    def accept(self, token_id: int) -> None:
        """Moves the window on."""
        if len(self._window) == self._window.maxlen:
            oldest = self._window[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._window.append(token_id)
        self._counts[token_id] += 1

    def token_ids(self) -> IntArray:
        """The tokens of the window."""
        return np.fromiter(self._counts.keys(), np.int32, len(self._counts))

    def apply(self, candidates: Candidates) -> Candidates:
        """Penalises the tokens of the window; the set no longer counts as sorted."""
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        at, found = candidates.find(self.token_ids())
        logits = candidates.logits.copy()
        old = logits[at]
        scaled = np.where(old <= 0, old * self._repeat, old / self._repeat)
        logits[at] = scaled - (counts[found] * self._frequency + self._presence)
        return candidates.with_logits(logits, is_sorted=False)

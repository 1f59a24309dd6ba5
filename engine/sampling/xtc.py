"""XTC ("exclude top choices"): now and then, all likely tokens but the last of them are dropped."""

from __future__ import annotations

import numpy as np

from engine.sampling.candidates import Candidates, softmax
from engine.sampling.mt19937 import Mt19937
from engine.sampling.stage import Stage


class Xtc(Stage):
    """With some chance drops every token of at least the threshold except the least likely one.

    Does nothing where fewer than `min_keep` would be left. One float is drawn per token that has
    two candidates or more.

    Source: llama.cpp `llama_sample_xtc_apply`.
    """

    def __init__(self, *, probability: float, threshold: float, min_keep: int, seed: int) -> None:
        self._probability = np.float32(probability)
        self._threshold = np.float32(threshold)
        self._min_keep = min_keep
        self._generator = Mt19937(seed)

    def apply(self, candidates: Candidates) -> Candidates:
        """Draws, and drops the top choices if the draw says so."""
        if len(candidates) < 2:
            return candidates
        if np.float32(self._generator.next_float()) > self._probability:
            return candidates
        candidates = candidates.sorted()
        likely = softmax(candidates) >= self._threshold
        num_likely = len(likely) if likely.all() else int(np.argmin(likely))
        dropped = num_likely - 1
        if dropped < 1 or len(candidates) - dropped < self._min_keep:
            return candidates
        return candidates.take(slice(dropped, None), is_sorted=True)

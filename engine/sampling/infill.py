"""Infill: keeps an end token or a few tokens that fill a gap with some certainty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from engine.sampling.candidates import Candidates, softmax
from engine.sampling.float32 import NEG_INF, sum_in_order
from engine.sampling.stage import Stage
from engine.sampling.vocab import SamplerVocab
from engine.step import FloatArray

_END_WEIGHT = np.float32(3)
_FIRST_THRESHOLD = np.float32(0.2)


class Infill(Stage):
    """Ends when an end of generation is likely; else merges prefixes and keeps what stands out.

    Source: llama.cpp `llama_sampler_infill_apply`. `vocab.end_token` must not be None.
    """

    def __init__(self, vocab: SamplerVocab) -> None:
        self._vocab = vocab
        self._ends = np.array(sorted(vocab.eog_tokens), dtype=np.int32)

    def apply(self, candidates: Candidates) -> Candidates:
        """Keeps end tokens only, or what stands out after merging."""
        candidates = candidates.sorted()
        probs = softmax(candidates)
        is_end = np.isin(candidates.ids, self._ends)
        ends, texts = sum_in_order(probs[is_end]), sum_in_order(probs[~is_end])
        if _END_WEIGHT * ends * np.float32(len(probs)) > texts:
            return candidates.take(is_end, is_sorted=True)
        candidates, probs = self._merged(candidates, probs)
        kept = np.flatnonzero((probs >= _FIRST_THRESHOLD) | is_end)
        num_texts = int(np.count_nonzero(~is_end[kept]))
        if not num_texts:
            return self._only_end()
        probs = probs[kept] / sum_in_order(probs[kept])
        threshold = np.float32(1.0 / (num_texts + 1))
        kept = kept[(probs >= threshold) | is_end[kept]]
        return candidates.take(kept, is_sorted=True)

    def _only_end(self) -> Candidates:
        end = self._vocab.end_token
        assert end is not None
        return Candidates(np.array([end], np.int32), np.ones(1, np.float32), is_sorted=True)

    def _merged(self, candidates: Candidates, probs: FloatArray) -> tuple[Candidates, FloatArray]:
        """Moves the weight of a token and of its prefixes to whichever is likelier."""
        logits, probs = candidates.logits.copy(), probs.copy()
        pieces = [self._vocab.piece(token_id) for token_id in candidates.ids.tolist()]
        for i, longer in enumerate(_extensions(pieces)):
            for j in longer:
                if logits[i] == NEG_INF:
                    break
                if logits[j] == NEG_INF:
                    continue
                target, source = (j, i) if probs[j] > probs[i] else (i, j)
                probs[target] += probs[source]
                probs[source] = 0
                logits[source] = NEG_INF
        return candidates.with_logits(logits), probs


def _extensions(pieces: Sequence[bytes]) -> list[list[int]]:
    """Returns for each piece the indexes, rising, of the other pieces that begin with it.

    An empty piece has none.
    """
    indexes: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        indexes[piece].append(i)
    found: list[list[int]] = [[] for _ in pieces]
    for j, piece in enumerate(pieces):
        for length in range(1, len(piece) + 1):
            for i in indexes.get(piece[:length], ()):
                if i != j:
                    found[i].append(j)
    return found

"""A row held in memory, and a vocabulary of made-up words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampling.candidates import Candidates
from engine.sampling.vocab import SamplerVocab
from engine.step import FloatArray, IntArray


class ArrayRow:
    """Logits on the host; `num_full` counts how often the whole row was asked for."""

    def __init__(self, logits: Sequence[float] | FloatArray, *, num_top: int = 64) -> None:
        self._logits = np.array(logits, np.float32)
        self._logits.setflags(write=False)
        self._num_top = num_top
        self.num_full = 0

    @property
    def vocab_size(self) -> int:
        return len(self._logits)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self._logits).all())

    @property
    def log_sum_exp(self) -> float:
        return float(np.log(np.exp(self._logits.astype(np.float64)).sum()))

    def top(self) -> tuple[IntArray, FloatArray]:
        order = np.argsort(-self._logits, kind="stable")[: self._num_top]
        return order.astype(np.int32), self._logits[order]

    def at(self, token_ids: IntArray) -> FloatArray:
        return self._logits[token_ids]

    def full(self) -> FloatArray:
        self.num_full += 1
        return self._logits


def candidates(logits: Sequence[float], *, is_sorted: bool = False) -> Candidates:
    """A complete set with ids 0, 1, 2, ..."""
    ids = np.arange(len(logits), dtype=np.int32)
    return Candidates(ids, np.array(logits, np.float32), is_sorted, in_id_order=True)


def from_probs(probs: Sequence[float]) -> Candidates:
    """A complete set whose softmax is near `probs`."""
    return candidates(np.log(np.array(probs)).tolist())


def ids(found: Candidates) -> list[int]:
    return found.ids.tolist()


def make_vocab(
    words: Sequence[bytes] | int,
    *,
    eog: Sequence[int] = (),
    end_token: int | None = None,
    suppressed: Sequence[int] = (),
) -> SamplerVocab:
    """Words given, or w0, w1, ...; a text is tokenized by its bytes, greedily."""
    if isinstance(words, int):
        words = [b"w%d" % i for i in range(words)]
    by_bytes = {word: i for i, word in enumerate(words)}

    def tokenize(text: str) -> list[int]:
        found: list[int] = []
        rest = text.encode()
        while rest:
            size = max(n for n in range(1, len(rest) + 1) if rest[:n] in by_bytes)
            found.append(by_bytes[rest[:size]])
            rest = rest[size:]
        return found

    return SamplerVocab(
        vocab_size=len(words),
        eog_tokens=frozenset(eog),
        piece=words.__getitem__,
        word=words.__getitem__,
        tokenize=tokenize,
        end_token=end_token,
        suppressed_tokens=frozenset(suppressed),
    )

"""A row in which some tokens are ruled out."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from engine.constraint import BoolArray
from engine.sampling.candidates import largest
from engine.step import FloatArray, IntArray, RowLogits

_NUM_TOP = 64


class MaskedRow:
    """The logits of a row, minus infinity where a mask is false. Implements `RowLogits`.

    The tokens that are ruled out stay in play, as in llama.cpp: samplers that count see them.
    """

    def __init__(self, row: RowLogits, mask: BoolArray) -> None:
        self._row = row
        self._mask = mask

    @classmethod
    def of_one(cls, row: RowLogits, token_id: int) -> MaskedRow:
        """Rules out every token but one."""
        mask = np.zeros(row.vocab_size, np.bool_)
        mask[token_id] = True
        return cls(row, mask)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._row.vocab_size

    @property
    def is_finite(self) -> bool:
        """As the row itself: that a token is ruled out is no fault."""
        return self._row.is_finite

    @property
    def log_sum_exp(self) -> float:
        """That of the row without the mask."""
        return self._row.log_sum_exp

    def top(self) -> tuple[IntArray, FloatArray]:
        """The best candidates (ids, logits), sorted by falling logit, ties by rising id."""
        # Few tokens may follow, mostly: only those are compared, not the whole vocabulary.
        allowed = np.flatnonzero(self._mask)
        logits = self._row.full()[allowed]
        count = min(_NUM_TOP, len(self._mask))
        order = largest(logits, min(count, len(allowed)))
        ids, values = allowed[order], logits[order]
        if len(ids) < count:
            others = np.flatnonzero(~self._mask)[: count - len(ids)]
            ids = np.concatenate([ids, others])
            values = np.concatenate([values, np.full(len(others), -np.inf, np.float32)])
        return ids.astype(np.int32), values

    def at(self, token_ids: IntArray) -> FloatArray:
        """The logits of some ids."""
        return self._masked[token_ids]

    def full(self) -> FloatArray:
        """All logits, in id order."""
        return self._masked

    @cached_property
    def _masked(self) -> FloatArray:
        return np.where(self._mask, self._row.full(), np.float32(-np.inf))

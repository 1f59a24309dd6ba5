"""How the final states of a text's tokens become its vector, and how that is scaled. Pure numpy.

Source: llama.cpp `llm_graph_context::build_pooling` and `common_embd_normalize`.
"""

from __future__ import annotations

import numpy as np

from engine.model.encoder_spec import ScoredState
from engine.model.scoring import ScoringHead
from engine.requests import Pooling
from engine.step import FloatArray

# What the greatest magnitude becomes: 16-bit integers hold it.
_MAX_ABSOLUTE = 32760.0
_POOLED_FOR = {
    ScoredState.FIRST: Pooling.CLS,
    ScoredState.LAST: Pooling.LAST,
    ScoredState.MEAN: Pooling.MEAN,
}
NO_NORM, MAX_NORM, EUCLIDEAN = -1, 0, 2


class StatePooling:
    """Takes the states of a text's tokens as chunks of it are evaluated.

    Keeps no more than its result needs: all rows only where nothing is pooled.
    """

    def __init__(self, pooling: Pooling, head: ScoringHead | None = None) -> None:
        """`head` scores the pooled state; RANK needs one, which also says what it scores."""
        self._head = head if pooling is Pooling.RANK else None
        self.pooling = pooling if self._head is None else _POOLED_FOR[self._head.state]
        self._rows: list[FloatArray] = []
        self._num_tokens = 0

    def add(self, states: FloatArray) -> None:
        """Takes the final states of the next tokens, f32 [tokens, width]."""
        self._num_tokens += len(states)
        match self.pooling:
            case Pooling.NONE:
                self._rows.append(np.array(states))
            case Pooling.MEAN:
                total = states.sum(axis=0, dtype=np.float32)
                self._rows = [total + self._rows[0] if self._rows else total]
            case Pooling.CLS:
                self._rows = self._rows or [np.array(states[0])]
            case Pooling.LAST:
                self._rows = [np.array(states[-1])]
            case Pooling.RANK:
                raise AssertionError("RANK pooling without a head")

    def again(self) -> StatePooling:
        """Returns one for the same text from its beginning."""
        return StatePooling(Pooling.RANK if self._head else self.pooling, self._head)

    def result(self) -> FloatArray:
        """Returns f32 [rows, width]: one row, or one per token where nothing is pooled.

        With RANK the row has the scores.
        """
        pooled = self._pooled()
        return pooled if self._head is None else self._head.scores(pooled[0])[None]

    def _pooled(self) -> FloatArray:
        match self.pooling:
            case Pooling.NONE:
                return np.concatenate(self._rows)
            case Pooling.MEAN:
                return (self._rows[0] / np.float32(self._num_tokens))[None]
            case _:
                return self._rows[0][None]


def normalised(vector: FloatArray, norm: int) -> FloatArray:
    """Scales f32 [width]: -1 not at all, 0 by the greatest magnitude, p > 0 by the p-norm.

    A vector of zeros stays one.
    """
    if norm == NO_NORM:
        return vector
    wide = np.abs(vector.astype(np.float64))
    if norm == MAX_NORM:
        size = wide.max(initial=0.0) / _MAX_ABSOLUTE
    elif norm == EUCLIDEAN:
        size = float(np.sqrt(np.sum(wide * wide)))
    else:
        size = _p_norm(wide, norm)
    return (vector * np.float32(1.0 / size if size > 0 else 0.0)).astype(np.float32)


def _p_norm(magnitudes: np.ndarray, p: int) -> float:
    """The p-norm, by way of the greatest magnitude so that no power overflows."""
    greatest = float(magnitudes.max(initial=0.0))
    if greatest == 0:
        return 0.0
    return greatest * float(np.sum((magnitudes / greatest) ** p) ** (1.0 / p))

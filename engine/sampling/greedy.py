"""The short way of a chain that takes the best token: no arrays, the same token.

Most benchmarks and many callers ask for temperature 0, where everything that the general chain
computes for a token is thrown away. Knows when it cannot answer, and then says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampling.candidates import Candidates
from engine.sampling.edits import LogitBias
from engine.sampling.stage import Pick, Stage
from engine.sampling.temperature import Temperature
from engine.step import RowLogits

_CERTAIN = np.ones(1, np.float32)
_CERTAIN.setflags(write=False)


class Greedy:
    """Takes the first of the row's best tokens that is not forbidden.

    The draw that ends the general chain takes the only token with any mass, whatever it draws, so
    no generator is needed here.
    """

    def __init__(self, forbidden: frozenset[int]) -> None:
        self._forbidden = forbidden

    @staticmethod
    def of(stages: Sequence[Stage]) -> Greedy | None:
        """Returns the short way of these stages; None if they do more than forbid and take."""
        forbidden: frozenset[int] = frozenset()
        for stage in stages[:-1]:
            if not isinstance(stage, LogitBias) or not stage.only_forbids:
                return None
            forbidden |= frozenset(stage.token_ids().tolist())
        last = stages[-1] if stages else None
        if not isinstance(last, Temperature) or last.temperature > 0:
            return None
        return Greedy(forbidden)

    def pick(self, row: RowLogits) -> Pick | None:
        """Returns the token, alone; None where the listed ones do not decide it."""
        ids, logits = row.top()
        for at in range(len(ids)):
            if self._forbidden and int(ids[at]) in self._forbidden:
                continue
            if len(ids) < row.vocab_size and not logits[at] > logits[-1]:
                return None
            best = Candidates(ids[at : at + 1], logits[at : at + 1])
            return Pick(best, _CERTAIN, 0)
        return None

"""What the parts of a chain have in common: edits, filters, and the last one, which picks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from engine.sampling.candidates import Candidates
from engine.step import FloatArray, IntArray


class Stage(ABC):
    """One sampler: candidates in, candidates out."""

    def admits(self, candidates: Candidates) -> bool:
        """Says whether the result on this partial set equals that on the whole row.

        Asked only of partial sets. A stage that draws never says yes: a chain may start over with
        the whole row, and then runs the stages that said yes a second time.
        """
        del candidates
        return False

    @abstractmethod
    def apply(self, candidates: Candidates) -> Candidates:
        """Returns the candidates that are left, never none."""


class Edit(Stage):
    """A stage that changes the logits of a few known tokens."""

    def admits(self, candidates: Candidates) -> bool:
        """Always: a partial set lists every token that an edit may change."""
        return True

    @abstractmethod
    def token_ids(self) -> IntArray:
        """The ids that `apply` may change now; any order, repeats allowed."""


@dataclass(frozen=True)
class Pick:
    """A drawn token: the chain's last candidates, their probabilities, and which one it was."""

    candidates: Candidates
    probs: FloatArray
    selected: int

    @property
    def token_id(self) -> int:
        """The drawn token."""
        return int(self.candidates.ids[self.selected])


class Picker(ABC):
    """The last sampler of a chain."""

    def admits(self, candidates: Candidates) -> bool:
        """As `Stage.admits`."""
        del candidates
        return False

    @abstractmethod
    def pick(self, candidates: Candidates) -> Pick:
        """Draws a token."""


class Listener(Protocol):
    """Anything that remembers which tokens were taken."""

    def accept(self, token_id: int) -> None:
        """Records a token."""
        ...

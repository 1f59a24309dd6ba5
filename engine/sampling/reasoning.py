"""How long a model may think: counts the tokens of its reasoning and forces the end of it.

Knows token ids only; what opens and closes reasoning is given as such.

Source: llama.cpp `common_reasoning_budget_init`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from engine.requests import ReasoningBudget

_CONTINUES, _LEADS_2, _LEADS_3, _LEADS_4 = 0x80, 0xC0, 0xE0, 0xF0
_MAX_CHAR_BYTES = 4


class _Phase(Enum):
    OUTSIDE = auto()
    COUNTING = auto()
    # Spent in the middle of a character, which is let come to its end.
    SPENT = auto()
    FORCING = auto()


class ReasoningState:
    """Where one generation stands. Owned by one chain."""

    def __init__(self, budget: ReasoningBudget, piece: Callable[[int], bytes]) -> None:
        """Begins behind the tokens that the prompt's last turn opens with.

        Args:
            budget: The limit, and what opens and closes reasoning.
            piece: The bytes of a token's text.
        """
        self._budget = budget
        self._piece = piece
        self._opens = _Search([budget.start])
        self._closes = _Search(budget.ends)
        self._phase = _Phase.OUTSIDE
        self._num_left = 0
        self._num_forced = 0
        for token_id in budget.opening:
            self.accept(token_id)

    @property
    def is_inside(self) -> bool:
        """True within reasoning, where marks of other things mean nothing."""
        return self._phase is not _Phase.OUTSIDE

    @property
    def forced_token(self) -> int | None:
        """The one token that may follow, or None if any may."""
        if self._phase is not _Phase.FORCING:
            return None
        return self._budget.forced[self._num_forced]

    def accept(self, token_id: int) -> Sequence[int]:
        """Moves on by a token; returns the tokens that closed reasoning if it was the last of them."""
        match self._phase:
            case _Phase.OUTSIDE:
                if self._opens.accept(token_id):
                    self._closes.clear()
                    self._num_left = self._budget.tokens
                    self._phase = _Phase.COUNTING if self._num_left else self._forcing()
                return ()
            case _Phase.FORCING:
                closed = self._closes.accept(token_id)
                self._num_forced += 1
                if self._num_forced < len(self._budget.forced):
                    return ()
                self._phase = _Phase.OUTSIDE
                return closed
            case _:
                return self._count(token_id)

    def _count(self, token_id: int) -> Sequence[int]:
        closed = self._closes.accept(token_id)
        if closed:
            self._phase = _Phase.OUTSIDE
            return closed
        self._num_left -= 1
        if self._phase is _Phase.COUNTING and self._num_left:
            return ()
        self._closes.clear()
        is_whole = _ends_whole(self._piece(token_id))
        self._phase = self._forcing() if is_whole else _Phase.SPENT
        return ()

    def _forcing(self) -> _Phase:
        self._num_forced = 0
        return _Phase.FORCING if self._budget.forced else _Phase.OUTSIDE


class _Search:
    """Finds any of some sequences in a row of tokens; a find begins the search anew."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._sequences = sorted((tuple(one) for one in sequences if one), key=len, reverse=True)
        longest = len(self._sequences[0]) if self._sequences else 0
        self._last: deque[int] = deque(maxlen=longest)

    def accept(self, token_id: int) -> Sequence[int]:
        """Returns the longest sequence that ends with a token; empty if none does."""
        self._last.append(token_id)
        last = tuple(self._last)
        found = next((one for one in self._sequences if last[-len(one) :] == one), ())
        if found:
            self.clear()
        return found

    def clear(self) -> None:
        """Forgets what came before."""
        self._last.clear()


def _ends_whole(piece: bytes) -> bool:
    """Says whether bytes end at the end of a UTF-8 character."""
    for num_bytes, value in enumerate(reversed(piece[-_MAX_CHAR_BYTES:]), start=1):
        if value & _LEADS_2 == _CONTINUES:
            continue
        size = 1 + (value >= _LEADS_2) + (value >= _LEADS_3) + (value >= _LEADS_4)
        return num_bytes >= size
    return not piece

"""Contexts that are full and lose tokens in their middle: when, which, and the slot's pages for it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.generation import TokenText
from engine.requests import Request
from engine.scheduling.room import Room
from engine.scheduling.row import Row
from engine.slots.table import SlotTable

# So many tokens of the context are never kept.
_LEAST_MOVABLE = 4


@dataclass(frozen=True)
class Shift:
    """The first `keep` tokens stay, the `discard` after them go, the others move up."""

    keep: int
    discard: int


def plan_shift(request: Request, *, held: int, context_tokens: int, adds_bos: bool) -> Shift:
    """Returns the shift of a sequence of `held` tokens.

    Source: server_context::pre_decode (contract 5.3).
    """
    keep = len(request.prompt) if request.n_keep < 0 else request.n_keep
    keep = min(context_tokens - _LEAST_MOVABLE, keep + adds_bos)
    left = held - keep
    discard = request.n_discard or left // 2
    return Shift(keep, min(discard, left - 1))


class Shifts:
    """The shifts of one engine; none is ever due if it is not `is_on`."""

    def __init__(self, room: Room, table: SlotTable, tokenizer: TokenText, *, is_on: bool) -> None:
        self._room = room
        self._table = table
        self._tokenizer = tokenizer
        self._is_on = is_on

    def is_due(self, row: Row) -> bool:
        """Returns whether a row's slot has no room for the token that is pending."""
        return self._is_on and len(row.home.tokens) + 1 >= self._table.context_tokens

    def shift(self, row: Row) -> bool:
        """Makes room in a row's slot; False, with nothing changed, if others hold the pages for it.

        Raises whatever the device raises; the slot must be discarded then.
        """
        held = len(row.home.tokens)
        shift = plan_shift(
            row.request,
            held=held,
            context_tokens=self._table.context_tokens,
            adds_bos=self._tokenizer.add_bos,
        )
        if not self._room.move(row.home, shift.keep, range(shift.keep + shift.discard, held)):
            return False
        row.shift(shift.discard)
        return True

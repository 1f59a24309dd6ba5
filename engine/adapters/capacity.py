"""How much memory the banks take: pure integers, so that the planner counts them before the start.

Example:
    >>> capacity = AdapterCapacity(count=2, rank=10)
    >>> capacity.bank_rank, capacity.nbytes([(64, 32)])
    (16, 12304)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_RANK_STEP = 8
# Of an entry and a factor per weight and place.
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class AdapterCapacity:
    """How many adapters fit at once, and of which rank; a `count` of 0 takes none."""

    count: int = 0
    rank: int = 16

    @property
    def bank_rank(self) -> int:
        """The rank that programs are compiled for: the next multiple of 8."""
        return -(-self.rank // _RANK_STEP) * _RANK_STEP

    def place_bytes(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Returns what one place takes in the banks of weights of these (rows, cols)."""
        return sum(self.bank_rank * 4 * (rows + cols) + _ENTRY_BYTES for rows, cols in shapes)

    def nbytes(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Returns what all places take."""
        return self.count * self.place_bytes(shapes)

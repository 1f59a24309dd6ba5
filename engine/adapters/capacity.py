"""How much memory the banks take: pure integers, so that the planner counts them before the start.

Example:
    >>> capacity = AdapterCapacity(count=2, rank=10)
    >>> capacity.bank_rank, capacity.nbytes([(64, 32)])
    (16, 12304)
    >>> AdapterCapacity(count=2, rank=10, has_experts=True).nbytes([(4, 64, 32)])
    49216
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Shape = tuple[int, ...]
"""(rows, cols) of a weight, (experts, rows, cols) of a stack."""

_RANK_STEP = 8
# Of an entry and a factor per weight and place.
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class AdapterCapacity:
    """How many adapters fit at once, and of which rank; a `count` of 0 takes none.

    `has_experts`: they may change experts, whose banks are by far the largest.
    """

    count: int = 0
    rank: int = 16
    has_experts: bool = False

    @property
    def bank_rank(self) -> int:
        """The rank that programs are compiled for: the next multiple of 8."""
        return -(-self.rank // _RANK_STEP) * _RANK_STEP

    def takes(self, shape: Shape) -> bool:
        """Whether there is a bank for a weight of a shape."""
        return self.has_experts or len(shape) == 2

    def place_bytes(self, shapes: Iterable[Shape]) -> int:
        """Returns what one place takes in the banks of weights of these shapes."""
        return sum(
            math.prod(shape[:-2]) * (self.bank_rank * 4 * sum(shape[-2:]) + _ENTRY_BYTES)
            for shape in shapes
            if self.takes(shape)
        )

    def nbytes(self, shapes: Iterable[Shape]) -> int:
        """Returns what all places take."""
        return self.count * self.place_bytes(shapes)

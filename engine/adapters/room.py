"""Whether the banks fit beside everything else: the planner's arithmetic, before they are made."""

from __future__ import annotations

from dataclasses import replace

from engine.adapters.capacity import AdapterCapacity
from engine.errors import InvalidField
from engine.memory.split import PoolSizes, SplitShape


def check_bank_room(
    shape: SplitShape, sizes: PoolSizes, capacity: AdapterCapacity, bank_bytes: int
) -> None:
    """Checks that banks fit where everything else does.

    Args:
        shape: The pools and what else is fixed, without the banks.
        sizes: Those of the pools.
        capacity: What the banks are for.
        bank_bytes: What they take.

    Raises:
        InvalidField: They do not.
    """
    left = shape.budget_bytes(sizes) - shape.needed_bytes(sizes)
    with_banks = replace(shape, other_fixed_bytes=shape.other_fixed_bytes + bank_bytes)
    # What does not fit without banks either is not theirs to refuse.
    if left < 0 or with_banks.needed_bytes(sizes) <= with_banks.budget_bytes(sizes):
        return
    experts = " that may change experts" if capacity.has_experts else ""
    raise InvalidField(
        "max_adapters",
        f"{capacity.count} adapters of rank {capacity.bank_rank}{experts} need {bank_bytes} bytes, "
        f"{left} of {shape.limit_bytes} are left beside weights and pools",
    )

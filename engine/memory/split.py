"""How one budget of bytes is split over the pools: pure integers, no arrays, no model.

The same arithmetic serves a start, a plan that is only asked for, and a rebuild. Sizes are usable
units; pools that steps write into allocate one unit more, their write sink, which is priced too.
Nothing wraps: a budget below the fixed part is negative, and every target exceeds it.

Example:
    >>> kv = PoolShape(PoolKind.KV, unit_bytes=100, floor=2)
    >>> shape = SplitShape(architecture="llama", pools=(kv,), other_fixed_bytes=500, limit_bytes=2000)
    >>> check_target(shape, PoolSizes(kv=8), PoolSizes(kv=14)).needed_bytes
    1500
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from engine.memory.errors import BelowFloor, NoSuchPool, TooLarge
from engine.memory.planner import MemoryPlan
from engine.types import PoolInfo, PoolKind

# Pools whose target sizes come off the budget; the others share what is left of it.
FIXED_POOLS = frozenset({PoolKind.SWA, PoolKind.MAMBA})
SINK_UNITS = 1


@dataclass(frozen=True)
class PoolSizes:
    """Usable units of each pool; None where a target leaves a pool alone, or there is none."""

    kv: int | None = None
    swa: int | None = None
    mamba: int | None = None
    moe_cache: int | None = None

    def items(self) -> Iterator[tuple[PoolKind, int]]:
        """Yields the pools that have a size, in the order of `PoolKind`."""
        for kind in PoolKind:
            size = self.get(kind)
            if size is not None:
                yield kind, size

    def get(self, kind: PoolKind) -> int | None:
        """Returns one pool's size."""
        return getattr(self, kind.value)

    def over(self, other: PoolSizes) -> PoolSizes:
        """Returns `other` with the sizes that are set here in place of its own."""
        return replace(other, **{kind.value: size for kind, size in self.items()})


@dataclass(frozen=True)
class PoolShape:
    """What one pool costs and how small and large it may get.

    `most` is the size above which units are of no use (every expert resident); None has no end.
    """

    kind: PoolKind
    unit_bytes: int
    floor: int
    most: int | None = None

    @property
    def sink_units(self) -> int:
        """Units that are allocated beside the usable ones: nothing writes into experts."""
        return 0 if self.kind is PoolKind.MOE_CACHE else SINK_UNITS

    def bytes_of(self, size: int) -> int:
        """Returns the bytes of the whole pool, its sink included."""
        return (size + self.sink_units) * self.unit_bytes


@dataclass(frozen=True)
class SplitShape:
    """The pools that a model has and what they share.

    `other_fixed_bytes` are weights, adapter banks, workspace and the process itself: what no split
    changes.
    `limit_bytes` is all that the process may take.
    """

    architecture: str
    pools: tuple[PoolShape, ...]
    other_fixed_bytes: int
    limit_bytes: int

    def pool(self, kind: PoolKind) -> PoolShape | None:
        """Returns the shape of a pool, None where the model has none of the kind."""
        return next((pool for pool in self.pools if pool.kind is kind), None)

    def fixed_bytes(self, sizes: PoolSizes) -> int:
        """Returns the bytes that come off the limit before kv pages and experts are counted."""
        return self.other_fixed_bytes + self._sum(sizes, shared=False)

    def budget_bytes(self, sizes: PoolSizes) -> int:
        """Returns what kv pages and experts may take together; negative when over-committed."""
        return self.limit_bytes - self.fixed_bytes(sizes)

    def needed_bytes(self, sizes: PoolSizes) -> int:
        """Returns what kv pages and experts take together."""
        return self._sum(sizes, shared=True)

    def _sum(self, sizes: PoolSizes, *, shared: bool) -> int:
        return sum(
            pool.bytes_of(size)
            for pool in self.pools
            if (pool.kind not in FIXED_POOLS) is shared
            and (size := sizes.get(pool.kind)) is not None
        )


@dataclass(frozen=True)
class Split:
    """Sizes that fit, with the arithmetic that shows it."""

    sizes: PoolSizes
    needed_bytes: int
    budget_bytes: int
    fixed_bytes: int


@dataclass(frozen=True)
class MemoryLimits:
    """What the pools have to fit into, and beside what.

    `fixed_bytes` are weights, adapter banks and workspace, `limit_bytes` all that may be taken.
    `process_bytes` are fixed too: what the process takes beside all arrays, where the limit is one of
    the whole process.
    """

    architecture: str = ""
    fixed_bytes: int = 0
    limit_bytes: int = 1 << 40
    process_bytes: int = 0


def sizes_of(plan: MemoryPlan, num_experts: int | None) -> PoolSizes:
    """Returns the sizes of a plan, with experts if there are any."""
    return PoolSizes(
        kv=plan.kv_pages if plan.page_bytes else None,
        swa=plan.window.pages if plan.window else None,
        mamba=plan.states.states if plan.states else None,
        moe_cache=num_experts,
    )


def floors_of(plan: MemoryPlan) -> PoolSizes:
    """Returns the smallest sizes of the pools of a plan, experts aside."""
    return PoolSizes(
        kv=plan.kv_floor if plan.page_bytes else None,
        swa=plan.window.floor if plan.window else None,
        mamba=plan.states.floor if plan.states else None,
    )


def with_sizes(plan: MemoryPlan, sizes: PoolSizes) -> MemoryPlan:
    """Returns a plan with other sizes; those that are None stay."""
    if sizes.kv is not None:
        plan = replace(plan, kv_pages=sizes.kv)
    if plan.window and sizes.swa is not None:
        plan = replace(plan, window=replace(plan.window, pages=sizes.swa))
    if plan.states and sizes.mamba is not None:
        plan = replace(plan, states=replace(plan.states, states=sizes.mamba))
    return plan


def shape_of(plan: MemoryPlan, limits: MemoryLimits, experts: PoolInfo | None) -> SplitShape:
    """Returns the pools of a model; `experts` is its moe_cache pool, if it has one.

    Pages without bytes are no pool.
    """
    pools: list[PoolShape] = []
    if plan.page_bytes:
        pools.append(PoolShape(PoolKind.KV, plan.page_bytes, floor=plan.kv_floor))
    if plan.window:
        pools.append(PoolShape(PoolKind.SWA, plan.window.page_bytes, floor=plan.window.floor))
    if plan.states:
        pools.append(PoolShape(PoolKind.MAMBA, plan.states.state_bytes, floor=plan.states.floor))
    if experts:
        most = experts.ceiling
        pools.append(PoolShape(PoolKind.MOE_CACHE, experts.unit_bytes, experts.floor, most))
    fixed_bytes = limits.fixed_bytes + limits.process_bytes
    return SplitShape(limits.architecture, tuple(pools), fixed_bytes, limits.limit_bytes)


def check_target(shape: SplitShape, current: PoolSizes, target: PoolSizes) -> Split:
    """Returns what a target resolves to, in which absent pools keep their size.

    Raises:
        NoSuchPool: the model lacks a pool of the target; all such are listed.
        BelowFloor: a size is below its pool's floor; all such are listed.
        TooLarge: the sizes do not fit the budget, or one is above what is of use.
    """
    missing = tuple(kind.value for kind, _ in target.items() if shape.pool(kind) is None)
    if missing:
        raise NoSuchPool(missing, shape.architecture)
    below = tuple(
        (kind.value, size, pool.floor)
        for kind, size in target.items()
        if (pool := shape.pool(kind)) is not None and size < pool.floor
    )
    if below:
        raise BelowFloor(below)
    sizes = target.over(current)
    split = Split(
        sizes=sizes,
        needed_bytes=shape.needed_bytes(sizes),
        budget_bytes=shape.budget_bytes(sizes),
        fixed_bytes=shape.fixed_bytes(sizes),
    )
    above = tuple(
        (kind.value, size, pool.most)
        for kind, size in target.items()
        if (pool := shape.pool(kind)) is not None and pool.most is not None and size > pool.most
    )
    if above or split.needed_bytes > split.budget_bytes:
        raise TooLarge(
            needed_bytes=split.needed_bytes,
            budget_bytes=split.budget_bytes,
            fixed_bytes=split.fixed_bytes,
            sizes=tuple((kind.value, size) for kind, size in sizes.items()),
            above=above,
        )
    return split


def ceilings(shape: SplitShape, current: PoolSizes) -> Mapping[PoolKind, int]:
    """Returns the greatest size of each pool that fits while the others stay as they are.

    Never below the pool's present size: what is there is there, even when over-committed.
    """
    return {pool.kind: _ceiling(shape, pool, current) for pool in shape.pools}


def _ceiling(shape: SplitShape, pool: PoolShape, current: PoolSizes) -> int:
    size = current.get(pool.kind) or 0
    spare = shape.budget_bytes(current) - shape.needed_bytes(current)
    most = max(size, size + spare // pool.unit_bytes) if pool.unit_bytes else size
    return most if pool.most is None else min(most, pool.most)


@dataclass(frozen=True)
class Knobs:
    """What a user fixed at start; None leaves a size to the split.

    `kv_reserve` are the pages that experts must leave.
    """

    given: PoolSizes = PoolSizes()
    kv_reserve: int = 0


def first_split(shape: SplitShape, wanted: PoolSizes, knobs: Knobs, *, fills: bool) -> Split:
    """Returns the sizes to start with.

    Without `fills` every pool gets what is wanted. With it (a memory budget was given) experts
    come first, after the reserve of pages, and pages take the rest. A given size wins over the
    split and meets the same refusals.

    Raises:
        NoSuchPool: a given size is of a pool that the model lacks.
        BelowFloor: a given size, or what is left for a pool, is below its floor.
        TooLarge: the sizes do not fit.
    """
    missing = tuple(kind.value for kind, _ in knobs.given.items() if shape.pool(kind) is None)
    if missing:
        raise NoSuchPool(missing, shape.architecture)
    sizes = knobs.given.over(wanted)
    if fills:
        sizes = _with_experts(shape, sizes, knobs)
        sizes = _with_pages(shape, sizes, knobs)
    return check_target(shape, sizes, sizes)


def _with_experts(shape: SplitShape, sizes: PoolSizes, knobs: Knobs) -> PoolSizes:
    experts, pages = shape.pool(PoolKind.MOE_CACHE), shape.pool(PoolKind.KV)
    if experts is None or knobs.given.moe_cache is not None:
        return sizes
    kept = 0
    if pages is not None:
        least = max(pages.floor, knobs.kv_reserve)
        kept = pages.bytes_of(least if knobs.given.kv is None else knobs.given.kv)
    room = (shape.budget_bytes(sizes) - kept) // experts.unit_bytes - experts.sink_units
    most = room if experts.most is None else min(room, experts.most)
    # Below the floor nothing fits: the floor is asked for, so that the refusal has its numbers.
    return replace(sizes, moe_cache=max(most, experts.floor))


def _with_pages(shape: SplitShape, sizes: PoolSizes, knobs: Knobs) -> PoolSizes:
    pages = shape.pool(PoolKind.KV)
    if pages is None or knobs.given.kv is not None:
        return sizes
    others = shape.needed_bytes(replace(sizes, kv=None))
    room = (shape.budget_bytes(sizes) - others) // pages.unit_bytes - pages.sink_units
    return replace(sizes, kv=max(room, pages.floor))

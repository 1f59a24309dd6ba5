"""What the engine refuses about its pools: one class per cause, as `engine.errors` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import EngineError, lower_camel


@dataclass(eq=False)
class PoolsBusy(EngineError):
    """A rebuild needs an idle engine and no drain was asked for, or the drain ran out of time."""

    cause: str
    active_requests: int

    reason: ClassVar[str] = "POOLS_BUSY"
    template: ClassVar[str] = "the pools are in use ({cause}): {active_requests} requests run"


@dataclass(eq=False)
class NoSuchPool(EngineError):
    """A rebuild names pools that this model has none of."""

    pools: tuple[str, ...]
    architecture: str

    reason: ClassVar[str] = "NO_SUCH_POOL"

    def __str__(self) -> str:
        return f"a {self.architecture} model has no pool {' and no pool '.join(self.pools)}"

    def metadata(self) -> dict[str, str]:
        """Returns the names, comma-separated, and the architecture."""
        return {"pool": ",".join(self.pools), "architecture": self.architecture}


@dataclass(eq=False)
class BelowFloor(EngineError):
    """Sizes below the floors of their pools, as (pool, requested, floor)."""

    violations: tuple[tuple[str, int, int], ...]

    reason: ClassVar[str] = "BELOW_FLOOR"

    def __str__(self) -> str:
        return "; ".join(
            f"{pool}: {requested} is below the floor of {floor}"
            for pool, requested, floor in self.violations
        )

    def metadata(self) -> dict[str, str]:
        """Returns pools, sizes and floors, each comma-separated in the same order."""
        names = ("pool", "requested", "floor")
        columns = zip(*self.violations, strict=True)
        return {
            name: ",".join(map(str, column)) for name, column in zip(names, columns, strict=True)
        }


@dataclass(eq=False)
class TooLarge(EngineError):
    """Sizes that do not fit the budget, which is negative when the fixed part alone exceeds it.

    `sizes` are all of the target as (pool, units). `above` are those past the last unit that is of
    use, as (pool, requested, most). `more_bytes` are what the change takes for a while beyond what is
    in use, where the system has only `available_bytes` for that.
    """

    needed_bytes: int
    budget_bytes: int
    fixed_bytes: int
    sizes: tuple[tuple[str, int], ...]
    above: tuple[tuple[str, int, int], ...] = ()
    more_bytes: int = 0
    available_bytes: int | None = None

    reason: ClassVar[str] = "TOO_LARGE"

    def __str__(self) -> str:
        sizes = ", ".join(f"{pool} {size}" for pool, size in self.sizes)
        limits = "".join(
            f"; {pool}: {requested} is above {most}, where all is resident"
            for pool, requested, most in self.above
        )
        if self.available_bytes is not None:
            limits += (
                f"; on the way, with copies of what is kept, {self.more_bytes} bytes more than now "
                f"are taken and the system has {self.available_bytes}: fewer kv pages keep less"
            )
        return (
            f"{sizes}: {self.needed_bytes} bytes are needed, the budget is {self.budget_bytes} "
            f"({self.fixed_bytes} bytes are fixed){limits}"
        )

    def metadata(self) -> dict[str, str]:
        """Returns the bytes, and each pool's size under its name."""
        numbers = {
            "neededBytes": str(self.needed_bytes),
            "budgetBytes": str(self.budget_bytes),
            "fixedBytes": str(self.fixed_bytes),
        }
        if self.available_bytes is not None:
            numbers |= {
                "moreBytes": str(self.more_bytes),
                "availableBytes": str(self.available_bytes),
            }
        return numbers | {lower_camel(pool): str(size) for pool, size in self.sizes}


@dataclass(eq=False)
class RebuildRolledBack(EngineError):
    """A stage of a rebuild failed; everything is as it was."""

    stage: str

    reason: ClassVar[str] = "REBUILD_ROLLED_BACK"
    template: ClassVar[str] = "the rebuild failed in stage {stage} and was undone"


@dataclass(eq=False)
class RebuildFailed(EngineError):
    """A stage of a rebuild failed and could not be undone: nothing is served any more."""

    stage: str

    reason: ClassVar[str] = "REBUILD_FAILED"
    template: ClassVar[str] = "the rebuild failed in stage {stage} and could not be undone"

"""A history of writes and reads of one name, and whether it could have happened.

What a name holds is the last write. A read may see any write that could be the last at some moment
of the read: one that had not certainly been overwritten, by a write that began after its end and
ended before the read began. A write that was cut off may or may not have happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """What its client knows of an operation."""

    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Write:
    """One write of a value; times are of one monotonic clock."""

    value: int
    begun_s: float
    ended_s: float
    outcome: Outcome


@dataclass(frozen=True)
class Read:
    """One read; `value` None: the name held nothing."""

    value: int | None
    begun_s: float
    ended_s: float


@dataclass
class Register:
    """All that was written to and read from one name."""

    writes: list[Write] = field(default_factory=list[Write])
    reads: list[Read] = field(default_factory=list[Read])

    def impossible(self) -> list[Read]:
        """Returns the reads that no order of these writes explains."""
        return [read for read in self.reads if not self._explains(read)]

    def _explains(self, read: Read) -> bool:
        if read.value is None:
            return not any(
                write.outcome is Outcome.DONE and write.ended_s < read.begun_s
                for write in self.writes
            )
        return any(
            write.value == read.value
            and write.outcome is not Outcome.REFUSED
            and write.begun_s < read.ended_s
            and not self._is_overwritten(write, read)
            for write in self.writes
        )

    def _is_overwritten(self, write: Write, read: Read) -> bool:
        # One that was cut off by the server's death has no end of its own: what came of it, came
        # before the next start, and so before any later write began.
        return any(
            later.outcome is Outcome.DONE
            and write.ended_s < later.begun_s
            and later.ended_s < read.begun_s
            for later in self.writes
        )

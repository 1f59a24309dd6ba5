"""The faults of one request, collected so that a caller hears of all of them at once.

Example:
    >>> faults = Faults()
    >>> faults.number("sampling.top_p", 1.5, low=0.0, high=1.0)
    >>> faults.raise_if_any()
    Traceback (most recent call last):
    engine.errors.InvalidField: sampling.top_p: 1.5 is not between 0 and 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from engine.errors import InvalidField
from service.errors import InvalidFields

# Source: google.protobuf.Duration, +-10,000 years.
_MAX_DURATION_S = 315_576_000_000
_MAX_NANOS = 999_999_999
# A description shows this much of an offending text.
_SHOWN_CHARS = 40


class Faults:
    """The faults found so far in one request."""

    def __init__(self) -> None:
        self._found: list[InvalidField] = []

    def add(self, field: str, description: str) -> None:
        """Records one fault."""
        self._found.append(InvalidField(field=field, description=description))

    def number(
        self,
        field: str,
        value: float,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        excludes_low: bool = False,
    ) -> None:
        """Records a number that is not finite or not between `low` and `high`."""
        if not math.isfinite(value):
            self.add(field, f"{value} is not a finite number")
        elif value < low or value > high or (excludes_low and value == low):
            self.add(field, f"{_number(value)} is not {_range(low, high, excludes_low)}")

    def size(self, field: str, size: int, limit: int, unit: str) -> None:
        """Records a list, map or text that is longer than `limit`."""
        if size > limit:
            self.add(field, f"{size} {unit}, limit {limit}")

    def known(self, field: str, value: int, names: Iterable[int], *, may_be_unset: bool) -> None:
        """Records an enum value that the contract does not have."""
        if value == 0 and may_be_unset:
            return
        legal = [number for number in names if number != 0]
        if value not in legal:
            self.add(field, f"{value} is none of the values {legal[0]} to {legal[-1]}")

    def duration(self, field: str, duration: Duration, *, may_be_zero: bool = False) -> None:
        """Records a duration that is malformed, negative, or zero where that is refused."""
        seconds, nanos = duration.seconds, duration.nanos
        is_formed = (
            abs(seconds) <= _MAX_DURATION_S and abs(nanos) <= _MAX_NANOS and seconds * nanos >= 0
        )
        if not is_formed:
            self.add(field, f"{seconds} s and {nanos} ns are not a well-formed duration")
        elif min(seconds, nanos) < 0 or not (may_be_zero or seconds or nanos):
            limit = "at least" if may_be_zero else "above"
            self.add(field, f"{seconds + nanos / 1e9:.9g} s is not {limit} 0 s")

    def raise_if_any(self) -> None:
        """Raises what was recorded.

        Raises:
            InvalidField: One fault.
            InvalidFields: Several.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise InvalidFields(tuple(self._found))


def shown(text: str) -> str:
    """Returns the beginning of a caller's text, quoted and in plain ASCII, for a message."""
    return ascii(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


def _range(low: float, high: float, excludes_low: bool) -> str:
    if high == math.inf:
        return f"above {_number(low)}" if excludes_low else f"at least {_number(low)}"
    if low == -math.inf:
        return f"at most {_number(high)}"
    return f"between {_number(low)} and {_number(high)}"


def _number(value: float) -> str:
    """Seven digits are what a float32 holds: 0.9 does not show as 0.899999976."""
    return str(value) if isinstance(value, int) else f"{value:.7g}"

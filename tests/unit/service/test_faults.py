from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from engine.errors import InvalidField
from service.errors import InvalidFields
from service.faults import Faults, shown


def fault(**limits: float) -> str | None:
    value = limits.pop("value")
    faults = Faults()
    faults.number("f", value, **limits)  # pyright: ignore[reportArgumentType]
    try:
        faults.raise_if_any()
    except InvalidField as error:
        return error.description
    return None


def test_no_fault_raises_nothing() -> None:
    Faults().raise_if_any()


def test_one_fault_is_itself_and_several_are_collected() -> None:
    faults = Faults()
    faults.add("a", "bad")
    with pytest.raises(InvalidField, match="a: bad"):
        faults.raise_if_any()
    faults.add("b", "worse")
    with pytest.raises(InvalidFields, match="a: bad; b: worse"):
        faults.raise_if_any()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"value": 0.0, "low": 0.0, "high": 1.0}, None),
        ({"value": 1.0, "low": 0.0, "high": 1.0}, None),
        ({"value": 1.5, "low": 0.0, "high": 1.0}, "1.5 is not between 0 and 1"),
        ({"value": -1, "low": 0}, "-1 is not at least 0"),
        ({"value": 2, "high": 1}, "2 is not at most 1"),
        ({"value": 0.0, "low": 0.0, "excludes_low": True}, "0 is not above 0"),
        (
            {"value": 2**31, "low": 0, "high": 2**31 - 1},
            "2147483648 is not between 0 and 2147483647",
        ),
        ({"value": math.nan}, "nan is not a finite number"),
        ({"value": math.inf}, "inf is not a finite number"),
        ({"value": -math.inf}, "-inf is not a finite number"),
        # As a float32 field holds 0.9.
        ({"value": 0.8999999761581421, "low": 1.0}, "0.9 is not at least 1"),
    ],
)
def test_numbers(limits: dict[str, float], expected: str | None) -> None:
    assert fault(**limits) == expected


@pytest.mark.parametrize(
    ("duration", "is_good"),
    [
        (Duration(seconds=1), True),
        (Duration(nanos=1), True),
        (Duration(), False),
        (Duration(seconds=-1), False),
        (Duration(nanos=-1), False),
        (Duration(seconds=1, nanos=-1), False),
        (Duration(seconds=-1, nanos=1), False),
        (Duration(nanos=10**9), False),
        (Duration(seconds=2**60), False),
    ],
)
def test_durations(duration: Duration, is_good: bool) -> None:
    faults = Faults()
    faults.duration("f", duration)
    if is_good:
        faults.raise_if_any()
        return
    with pytest.raises(InvalidField):
        faults.raise_if_any()


def test_a_duration_of_nothing_may_be_allowed() -> None:
    faults = Faults()
    faults.duration("f", Duration(), may_be_zero=True)
    faults.raise_if_any()


def test_enums() -> None:
    faults = Faults()
    faults.known("f", 2, [0, 1, 2], may_be_unset=False)
    faults.known("f", 0, [0, 1, 2], may_be_unset=True)
    faults.raise_if_any()
    faults.known("f", 0, [0, 1, 2], may_be_unset=False)
    with pytest.raises(InvalidField, match="0 is none of the values 1 to 2"):
        faults.raise_if_any()


def test_a_callers_text_is_shown_short_and_in_ascii() -> None:
    assert shown("\u00e9\n") == "'\\xe9\\n'"
    assert len(shown("x" * 10_000)) < 50

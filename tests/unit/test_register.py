"""The model by which the history of a server under faults is judged must itself see faults."""

from __future__ import annotations

import pytest

from tests.e2e.register import Outcome, Read, Register, Write


def done(value: int, begun_s: float, ended_s: float) -> Write:
    return Write(value, begun_s, ended_s, Outcome.DONE)


@pytest.mark.parametrize(
    ("read", "is_possible"),
    [
        (Read(None, 0.0, 0.5), True),
        (Read(None, 0.0, 1.5), True),
        (Read(None, 2.5, 3.0), False),
        (Read(1, 0.0, 0.5), False),
        (Read(1, 1.5, 1.6), True),
        (Read(1, 2.5, 3.5), True),
        (Read(1, 4.5, 5.0), False),
        (Read(2, 3.5, 3.6), True),
        (Read(2, 4.5, 5.0), True),
        (Read(7, 4.5, 5.0), False),
    ],
)
def test_reads_of_two_writes_one_after_another(read: Read, is_possible: bool):
    register = Register([done(1, 1.0, 2.0), done(2, 3.0, 4.0)], [read])
    assert register.impossible() == ([] if is_possible else [read])


def test_writes_at_once_may_end_in_any_order():
    register = Register([done(1, 1.0, 3.0), done(2, 2.0, 4.0)], [Read(1, 5.0, 6.0)])
    assert not register.impossible()


def test_a_write_that_was_cut_off_may_have_happened_and_a_refused_one_has_not():
    cut = Write(2, 3.0, 4.0, Outcome.UNKNOWN)
    refused = Write(3, 3.0, 4.0, Outcome.REFUSED)
    seen = [Read(1, 5.0, 6.0), Read(2, 5.0, 6.0), Read(3, 5.0, 6.0)]
    register = Register([done(1, 1.0, 2.0), cut, refused], seen)
    assert register.impossible() == [seen[2]]

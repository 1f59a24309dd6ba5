from __future__ import annotations

import pytest

from engine.errors import DuplicateRequest, QueueFull
from engine.requests import Request
from engine.scheduling.gate import Gate, request_bytes
from engine.types import CacheSource, CancelCause, Cancelled, Failed, Started

STARTED = Started(0, 1, 0, CacheSource.NONE, "", (), 0)


def test_the_count_is_bounded_and_a_start_makes_room() -> None:
    gate = Gate(max_requests=2, max_bytes=1 << 20)
    gate.enter(Request("a", (1,)))
    gate.enter(Request("b", (1,)))
    with pytest.raises(QueueFull) as refusal:
        gate.enter(Request("c", (1,)))
    assert (refusal.value.queued, refusal.value.limit) == (2, 2)
    gate.settle([("a", STARTED)])
    gate.enter(Request("c", (1,)))
    assert gate.num_waiting == 2


def test_the_bytes_are_bounded_and_given_back_once() -> None:
    size = request_bytes(Request("a", (1,) * 100))
    gate = Gate(max_requests=9, max_bytes=2 * size)
    for _ in range(3):
        gate.enter(Request("a", (1,) * 100))
        gate.enter(Request("b", (1,) * 100))
        with pytest.raises(QueueFull, match=f"{3 * size} queued, limit {2 * size}"):
            gate.enter(Request("c", (1,) * 100))
        gate.settle([("a", STARTED), ("a", Failed(ValueError())), ("b", Failed(ValueError()))])
        assert gate.num_waiting == 0


def test_a_group_counts_once_until_its_last_member_starts() -> None:
    gate = Gate(max_requests=2, max_bytes=1 << 20)
    for name in ("a", "a-1", "a-2"):
        gate.enter(Request(name, (1,), group="a"))
    assert gate.num_waiting == 1
    gate.enter(Request("b", (1,)))
    with pytest.raises(QueueFull):
        gate.enter(Request("c", (1,)))
    gate.settle([("a", STARTED), ("a-1", STARTED)])
    assert gate.num_waiting == 2
    gate.settle([("a-2", Cancelled(CancelCause.CLIENT))])
    assert gate.num_waiting == 1
    gate.enter(Request("c", (1,)))


def test_a_group_that_got_in_gets_in_whole() -> None:
    gate = Gate(max_requests=1, max_bytes=1 << 20)
    gate.enter(Request("a", (1,), group="a"))
    gate.settle([("a", STARTED)])
    gate.enter(Request("b", (1,)))
    # The engine may start a sample before the next one is submitted.
    gate.enter(Request("a-1", (1,), group="a"))
    with pytest.raises(QueueFull):
        gate.enter(Request("c-1", (1,), group="c"))
    gate.settle([(name, Failed(ValueError())) for name in ("a", "a-1")])
    with pytest.raises(QueueFull):
        gate.enter(Request("a-2", (1,), group="a"))


def test_a_groups_name_is_not_a_requests() -> None:
    gate = Gate(max_requests=1, max_bytes=1 << 20)
    gate.enter(Request("a", (1,)))
    with pytest.raises(QueueFull):
        gate.enter(Request("b", (1,), group="a"))


def test_every_member_of_a_group_has_its_bytes() -> None:
    size = request_bytes(Request("a", (1,) * 100))
    gate = Gate(max_requests=9, max_bytes=2 * size)
    for name in ("a", "b"):
        gate.enter(Request(name, (1,) * 100, group="g"))
    with pytest.raises(QueueFull, match=f"{3 * size} queued, limit {2 * size}"):
        gate.enter(Request("c", (1,) * 100, group="g"))


def test_an_id_is_in_use_until_its_last_event() -> None:
    gate = Gate(max_requests=9, max_bytes=1 << 20)
    gate.enter(Request("a", (1,)))
    gate.settle([("a", STARTED)])
    with pytest.raises(DuplicateRequest, match="'a'"):
        gate.enter(Request("a", (1,)))
    assert gate.in_flight == ("a",)
    gate.settle([("a", Cancelled(CancelCause.CLIENT))])
    gate.enter(Request("a", (1,)))


def test_a_prompt_and_texts_have_a_size() -> None:
    plain = request_bytes(Request("a", ()))
    assert request_bytes(Request("a", (1,) * 1000)) - plain == 8000
    assert request_bytes(Request("a", (), stop=("é" * 500,))) - plain >= 1000

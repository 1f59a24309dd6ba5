from __future__ import annotations

from engine.requests import Request
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.row import Arrival, Row
from tests.unit.engine.scheduling.rows import make_row


def arrival(name: str, tenant: str = "", deadline_s: float | None = None) -> Arrival:
    return Arrival(Request(name, (1,), tenant=tenant, deadline_s=deadline_s), submitted_s=0.0)


def preempted(row: Row) -> Arrival:
    return Arrival(row.request, 0.0, row)


def names(queue: WaitingQueue) -> list[str]:
    return [one.request.request_id for one in queue.in_turn()]


def take_all(queue: WaitingQueue) -> list[str]:
    taken: list[str] = []
    while len(queue):
        first = next(queue.in_turn())
        queue.take(first)
        taken.append(first.request.request_id)
    return taken


def test_one_tenant_is_served_in_order() -> None:
    queue = WaitingQueue()
    for name in ("a", "b", "c"):
        queue.push(arrival(name))
    assert take_all(queue) == ["a", "b", "c"]


def test_tenants_take_turns() -> None:
    queue = WaitingQueue()
    for i in range(4):
        queue.push(arrival(f"flood{i}", "x"))
    queue.push(arrival("small", "y"))
    assert take_all(queue) == ["flood0", "small", "flood1", "flood2", "flood3"]


def test_a_tenant_that_was_served_goes_behind_the_others() -> None:
    queue = WaitingQueue()
    for name, tenant in (("x0", "x"), ("y0", "y"), ("z0", "z"), ("x1", "x"), ("y1", "y")):
        queue.push(arrival(name, tenant))
    queue.take(next(queue.in_turn()))
    assert names(queue) == ["y0", "z0", "x1", "y1"]


def test_preempted_requests_go_first_and_the_oldest_of_them_before_the_others() -> None:
    queue = WaitingQueue()
    queue.push(arrival("new"))
    for task_id in (5, 3, 4):
        queue.push_preempted(preempted(make_row(task_id=task_id)))
    assert names(queue) == ["r3", "r4", "r5", "new"]
    assert take_all(queue) == ["r3", "r4", "r5", "new"]


def test_discard_finds_every_kind_of_entry() -> None:
    queue = WaitingQueue()
    queue.push(arrival("a", "x"))
    queue.push(arrival("b", "y"))
    queue.push_preempted(preempted(make_row(task_id=0)))
    for name in ("b", "r0", "a"):
        found = queue.discard(name)
        assert found is not None
        assert found.request.request_id == name
    assert queue.discard("a") is None
    assert len(queue) == 0


def test_expired_entries_are_those_whose_deadline_has_come() -> None:
    queue = WaitingQueue()
    for name, deadline_s in (("past", 1.0), ("now", 2.0), ("later", 2.1), ("never", None)):
        queue.push(arrival(name, deadline_s=deadline_s))
    assert [one.request.request_id for one in queue.expired(2.0)] == ["past", "now"]

"""Requests that wait for a slot: first come first served within a tenant, tenants in turn.

Bounds are the gate's business; whether a request can start is the admission's.

Example:
    >>> queue = WaitingQueue()
    >>> for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
    ...     queue.push(Arrival(Request(name, (1,), tenant=tenant), submitted_s=0.0))
    >>> [arrival.request.request_id for arrival in queue.in_turn()]
    ['a1', 'b1', 'a2']
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from engine.scheduling.row import Arrival


class WaitingQueue:
    """All waiting requests; those that were pre-empted go before every other one."""

    def __init__(self) -> None:
        self._preempted: list[Arrival] = []
        # Dictionaries keep order and drop any entry in O(1). Tenants are in order of their turns.
        self._tenants: dict[str, dict[str, Arrival]] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._tenants.values()))

    def push(self, arrival: Arrival) -> None:
        """Puts a new request behind those of its tenant."""
        request = arrival.request
        self._tenants.setdefault(request.tenant, {})[request.request_id] = arrival

    def push_preempted(self, arrival: Arrival) -> None:
        """Puts a pre-empted request before all that never ran, the oldest first."""
        insort(self._preempted, arrival, key=_age)

    def in_turn(self) -> Iterator[Arrival]:
        """Yields every waiting request in the order in which they should start."""
        yield from self._preempted
        lanes = [iter(lane.values()) for lane in self._tenants.values()]
        while lanes:
            heads = [(lane, next(lane, None)) for lane in lanes]
            yield from (arrival for _, arrival in heads if arrival is not None)
            lanes = [lane for lane, arrival in heads if arrival is not None]

    def take(self, arrival: Arrival) -> None:
        """Removes a request that starts; its tenant goes behind the others."""
        if not self.discard(arrival.request.request_id) or arrival.row is not None:
            return
        tenant = arrival.request.tenant
        if tenant in self._tenants:
            self._tenants[tenant] = self._tenants.pop(tenant)

    def discard(self, request_id: str) -> Arrival | None:
        """Removes a request by id and returns it, or None if it does not wait."""
        for arrival in self._preempted:
            if arrival.request.request_id == request_id:
                self._preempted.remove(arrival)
                return arrival
        for tenant, lane in self._tenants.items():
            arrival = lane.pop(request_id, None)
            if arrival is None:
                continue
            if not lane:
                del self._tenants[tenant]
            return arrival
        return None

    @property
    def next_deadline_s(self) -> float | None:
        """When the first of them expires; None if none ever does."""
        deadlines = (arrival.request.deadline_s for arrival in self.in_turn())
        return min((at for at in deadlines if at is not None), default=None)

    def expired(self, now_s: float) -> list[Arrival]:
        """Returns the waiting requests whose deadline has passed."""
        return [
            arrival
            for arrival in self.in_turn()
            if arrival.request.deadline_s is not None and arrival.request.deadline_s <= now_s
        ]


def _age(arrival: Arrival) -> int:
    return arrival.row.task_id if arrival.row else -1

"""The bound on what may wait, and the ids in use.

Not thread-safe: the facade calls it under its lock, from callers and from the engine thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import DuplicateRequest, QueueFull
from engine.requests import Request
from engine.types import Cancelled, Embedded, Event, Failed, Finished, Started

# About what the interpreter keeps for a token of a prompt, and for an entry of a list.
_TOKEN_BYTES = 8
_ENTRY_BYTES = 64


@dataclass(frozen=True)
class _Entry:
    """A request in flight: what it counts for while it waits, and with whom it counts once."""

    party: tuple[str, str]
    size: int


class Gate:
    """Counts the requests between submit and admission, and their bytes."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self.num_refused = 0
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._waiting_bytes = 0
        # Every request that has had no last event, and those of them that wait.
        self._in_flight: dict[str, _Entry] = {}
        self._waiting: set[str] = set()
        self._parties_waiting: Counter[tuple[str, str]] = Counter()

    @property
    def max_requests(self) -> int:
        """The most that may wait, a group counting once."""
        return self._max_requests

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted, a group counting once."""
        return len(self._parties_waiting)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """The ids of all requests that have had no last event, sorted."""
        return tuple(sorted(self._in_flight))

    def enter(self, request: Request) -> None:
        """Lets a request in.

        Raises:
            DuplicateRequest: its id is in use.
            QueueFull: too many requests or bytes wait. A group whose first request got in is not
                refused for the number of them.
        """
        request_id = request.request_id
        if request_id in self._in_flight:
            raise DuplicateRequest(request_id)
        entry = _Entry(_party(request), request_bytes(request))
        if self.num_waiting >= self._max_requests and not self._is_inside(entry.party):
            raise QueueFull(self.num_waiting, self._max_requests)
        if self._waiting_bytes + entry.size > self._max_bytes:
            raise QueueFull(self._waiting_bytes + entry.size, self._max_bytes)
        self._in_flight[request_id] = entry
        self._waiting.add(request_id)
        self._parties_waiting[entry.party] += 1
        self._waiting_bytes += entry.size

    def settle(self, events: Iterable[tuple[str, Event]]) -> None:
        """Follows a step's events: who started waits no longer, who ended frees its id."""
        for request_id, event in events:
            if isinstance(event, Started | Finished | Embedded | Failed | Cancelled):
                self._leave_queue(request_id)
            if isinstance(event, Finished | Embedded | Failed | Cancelled):
                self._in_flight.pop(request_id, None)

    def _is_inside(self, party: tuple[str, str]) -> bool:
        return any(entry.party == party for entry in self._in_flight.values())

    def _leave_queue(self, request_id: str) -> None:
        if request_id not in self._waiting:
            return
        self._waiting.remove(request_id)
        entry = self._in_flight[request_id]
        self._waiting_bytes -= entry.size
        self._parties_waiting[entry.party] -= 1
        if not self._parties_waiting[entry.party]:
            del self._parties_waiting[entry.party]


def _party(request: Request) -> tuple[str, str]:
    """Who counts once: a group, or a request without one (whose id may be a group's name)."""
    return (request.group, "" if request.group else request.request_id)


def request_bytes(request: Request) -> int:
    """Returns about how many bytes a waiting request keeps alive."""
    sampling = request.sampling
    texts = (*request.stop, *sampling.dry_sequence_breakers)
    num_entries = len(texts) + len(sampling.logit_bias) + len(request.preserved_tokens)
    return (
        len(request.prompt) * _TOKEN_BYTES
        + num_entries * _ENTRY_BYTES
        + sum(len(text.encode()) for text in texts)
    )

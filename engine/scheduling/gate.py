"""The bound on what may wait, and the ids in use.

Not thread-safe: the facade calls it under its lock, from callers and from the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import DuplicateRequest, QueueFull
from engine.types import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Request,
    Started,
)

# About what the interpreter keeps for a token of a prompt, and for an entry of a list.
_TOKEN_BYTES = 8
_ENTRY_BYTES = 64


class Gate:
    """Counts the requests between submit and admission, and their bytes."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self.num_refused = 0
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._waiting_bytes = 0
        # The size of each waiting request, and every id that has had no last event.
        self._waiting: dict[str, int] = {}
        self._in_flight: set[str] = set()

    @property
    def max_requests(self) -> int:
        """The most requests that may wait."""
        return self._max_requests

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted."""
        return len(self._waiting)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """The ids of all requests that have had no last event, sorted."""
        return tuple(sorted(self._in_flight))

    def enter(self, request: Request) -> None:
        """Lets a request in.

        Raises:
            DuplicateRequest: its id is in use.
            QueueFull: too many requests or bytes wait.
        """
        if request.request_id in self._in_flight:
            raise DuplicateRequest(request.request_id)
        if len(self._waiting) >= self._max_requests:
            raise QueueFull(len(self._waiting), self._max_requests)
        size = request_bytes(request)
        if self._waiting_bytes + size > self._max_bytes:
            raise QueueFull(self._waiting_bytes + size, self._max_bytes)
        self._in_flight.add(request.request_id)
        self._waiting[request.request_id] = size
        self._waiting_bytes += size

    def settle(self, events: Iterable[tuple[str, Event]]) -> None:
        """Follows a step's events: who started waits no longer, who ended frees its id."""
        for request_id, event in events:
            if isinstance(event, Started | Finished | Failed | Cancelled):
                self._waiting_bytes -= self._waiting.pop(request_id, 0)
            if isinstance(event, Finished | Failed | Cancelled):
                self._in_flight.discard(request_id)


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

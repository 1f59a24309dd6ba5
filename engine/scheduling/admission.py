"""Who starts next: a waiting request gets a slot, what it may reuse, and its room.

Refuses what can never start; whom a full pool costs its place is the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.adapters.effective import EffectiveSet
from engine.errors import EngineError
from engine.failpoints import Site
from engine.memory.prefix_index import PrefixRoot
from engine.requests import Request
from engine.scheduling.beginning import begin_row
from engine.scheduling.ledger import Ledger
from engine.scheduling.parts import SchedulerParts
from engine.scheduling.patience import gains_by_waiting, reuse_limit
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.room import Room
from engine.scheduling.row import Arrival, Row
from engine.scheduling.shelf import Shelf
from engine.slots.prefixes import Prefixes, Reuse
from engine.slots.table import Slot, SlotTable


@dataclass(frozen=True)
class AdmissionParts:
    """What an admission works on, all of it the scheduler's.

    `rows`: the running requests by their ids, to which it adds. `on_failure` gets whatever the
    device raised, once the request that it hit has ended.
    """

    parts: SchedulerParts
    table: SlotTable
    prefixes: Prefixes
    room: Room
    queue: WaitingQueue
    rows: dict[str, Row]
    ledger: Ledger
    on_failure: Callable[[Exception], None]


@dataclass(frozen=True)
class Candidate:
    """A waiting request and the idle slot that it would get."""

    arrival: Arrival
    tokens: tuple[int, ...]
    adapters: EffectiveSet
    root: PrefixRoot
    slot: Slot


class Admission:
    """Moves requests from the queue onto slots."""

    def __init__(self, admission_parts: AdmissionParts) -> None:
        self._parts = admission_parts.parts
        self._table = admission_parts.table
        self._prefixes = admission_parts.prefixes
        self._room = admission_parts.room
        self._queue = admission_parts.queue
        self._rows = admission_parts.rows
        self._ledger = admission_parts.ledger
        self._on_failure = admission_parts.on_failure
        self._num_tasks = 0

    def refuse_if_too_long(self, arrival: Arrival) -> None:
        """Ends a waiting request for which the pool is too small even when empty."""
        # Behind shifts a sequence is longer than what its slot ever holds of it.
        most = min(len(arrival.tokens), self._table.context_tokens)
        refusal = self._room.refusal(most)
        if refusal is not None:
            self.refuse(arrival, refusal)

    def refuse(self, arrival: Arrival, error: Exception) -> None:
        """Takes a waiting request off the queue with an error."""
        self._queue.discard(arrival.request.request_id)
        self._ledger.failed(arrival.request, error, arrival.row)

    def pass_over(self, request: Request) -> None:
        """Counts a prompt that was refused for its length as a use of the slot it would have got.

        Source: llama.cpp looks at a prompt's length after it has given it a slot.
        """
        try:
            adapters = self._parts.adapters.freeze(request.adapters, request.prompt)
        except EngineError:
            return  # it would have got none
        root = self._parts.prefix_root(request, adapters.prefix_key)
        slot = self._table.choose(request.prompt, root=root, pinned=request.slot_id)
        if slot is not None:
            self._table.release(slot)

    def admit_all(self, now_s: float) -> None:
        """Starts every waiting request that can start, in turn."""
        while self._admit_next(now_s):
            pass

    def _admit_next(self, now_s: float) -> bool:
        """Takes the first waiting request that can start off the queue; False if none can."""
        for arrival in self._queue.in_turn():
            request = arrival.request
            adapters = self._frozen_adapters(arrival)
            if adapters is None:
                return True
            if request.slot_id is not None and not self._table.slot(request.slot_id).is_idle:
                continue  # of however many wait for one slot, a step looks at no prompt
            tokens = arrival.tokens
            root = self._parts.prefix_root(request, adapters.prefix_key)
            slot = self._table.choose(tokens, root=root, pinned=request.slot_id)
            if slot is None:
                return False
            if not tokens:
                self._pass_through(arrival, slot, now_s)
                return True
            # Who waits for pages holds back everybody behind: otherwise short requests could
            # keep a long one waiting for ever.
            return self._admit(Candidate(arrival, tokens, adapters, root, slot))
        return False

    def _frozen_adapters(self, arrival: Arrival) -> EffectiveSet | None:
        """The set that the request keeps from now on; None if it has none, and so has failed."""
        if arrival.row is not None:
            return arrival.row.adapters
        request = arrival.request
        try:
            return self._parts.adapters.freeze(request.adapters, request.prompt)
        except EngineError as error:
            self._queue.take(arrival)
            self._ledger.failed(request, error, None)
            return None

    def _admit(self, one: Candidate) -> bool:
        """Starts (or resumes) a request on its slot; False if it must wait."""
        found = self._find(one, limit=reuse_limit(one.arrival, one.adapters, one.slot))
        others = self._rows.values()
        if gains_by_waiting(
            one.arrival, one.adapters, one.root, one.tokens, found, others, self._table
        ):
            return False
        reserve = self._room.admission_tokens(one.arrival.request, len(one.tokens))
        shelf = None
        if one.arrival.request.is_warming:
            try:
                shelf = Shelf.of(one.slot, self._table, self._parts.runner)
            except Exception as error:
                self.refuse(one.arrival, self._parts.as_engine_error(error))
                self._on_failure(error)
                return True
            found = self._find(one, limit=one.adapters.prefix_limit)
        reuse = self._room.fit(one.slot, found, num_tokens=reserve)
        if reuse is None and shelf is not None:
            # Like everything idle, the old state gives way where the pool cannot hold both.
            shelf, _ = None, shelf.drop()
            reuse = self._room.fit(one.slot, found, num_tokens=reserve)
        if reuse is None:
            return False
        self._start(one, reuse, reserve, shelf)
        return True

    def _find(self, one: Candidate, *, limit: int | None) -> Reuse:
        request = one.arrival.request
        return self._prefixes.find(one.slot, one.root, request, one.tokens, limit=limit)

    def _start(self, one: Candidate, reuse: Reuse, reserve: int, shelf: Shelf | None) -> None:
        """Puts a request for which there is room on its slot; a fault ends this request alone."""
        arrival, slot = one.arrival, one.slot
        self._queue.take(arrival)
        seed = self._parts.seed_of(arrival.request)
        row = arrival.row or self._begin_row(arrival, one.adapters, seed, cached=reuse.total)
        if row is None:
            if shelf is not None:
                shelf.drop()
            return
        try:
            self._room.admit(slot, one.root, reuse, one.tokens, num_tokens=reserve)
        except Exception as error:
            self._ledger.failed(arrival.request, self._parts.as_engine_error(error), arrival.row)
            if shelf is not None:
                shelf.put_back(slot)
            self._on_failure(error)
            return
        row.slot, row.shelf = slot, shelf
        row.reused, row.dropped = reuse.total, 0
        self._rows[row.request_id] = row
        _occupy(slot, row)
        if arrival.row is None:
            self._ledger.started(row, seed=seed, source=reuse.source, no_reuse=reuse.no_reuse)

    def _begin_row(
        self, arrival: Arrival, adapters: EffectiveSet, seed: int, *, cached: int
    ) -> Row | None:
        """Makes what a request needs to run; None if that failed, which only ends this request."""
        try:
            self._parts.failpoints.check(Site.ADMIT)
            row = begin_row(self._parts, arrival, adapters, seed, self._table.context_tokens)
        except Exception as error:
            self._ledger.failed(arrival.request, self._parts.as_engine_error(error), None)
            return None
        row.task_id = self._next_task_id()
        row.cached_tokens = row.prompt_done = cached
        return row

    def _pass_through(self, arrival: Arrival, slot: Slot, now_s: float) -> None:
        """Ends a request with an empty prompt; its slot keeps what it holds."""
        self._queue.take(arrival)
        slot.request = arrival.request
        slot.task_id = self._next_task_id()
        self._table.release(slot)
        held = len(slot.tokens)
        self._ledger.nothing_to_do(arrival, slot_id=slot.slot_id, held=held, now_s=now_s)

    def _next_task_id(self) -> int:
        task_id = self._num_tasks
        self._num_tasks += 1
        return task_id


def _occupy(slot: Slot, row: Row) -> None:
    slot.state = row.state
    slot.request = row.request
    slot.task_id = row.task_id
    if row.adapters.prefix_limit is not None:
        slot.mark(row.adapters.prefix_limit)

"""What runs next: admission, room, one step, and the end of every request.

Single-threaded and deterministic: the clock, the runner, seeds and faults come from outside. Knows
no thread, transport or array; the policies are in `engine.scheduling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine.adapters.changes import AdapterChanges
from engine.failpoints import Site
from engine.generation import Ending
from engine.memory.pages import PageAllocator
from engine.pooling import StatePooling
from engine.requests import Request
from engine.scheduling.admission import Admission, AdmissionParts
from engine.scheduling.answers import Answers
from engine.scheduling.erasing import Erasure, Erasures
from engine.scheduling.faults import NonFiniteLogits, not_finite
from engine.scheduling.ledger import Ledger
from engine.scheduling.parts import SchedulerParts
from engine.scheduling.plan import Flight, StepPlan, plan_step, plan_texts
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.room import Room
from engine.scheduling.row import Arrival, Row, deadline_error
from engine.scheduling.shift import Shifts
from engine.scheduling.transfers import Transfers, busy
from engine.scheduling.wishes import Restore, Save
from engine.slots.prefixes import Prefixes
from engine.slots.table import Slot, SlotTable
from engine.step import PoolLost, RowLogits, SequenceWork
from engine.types import CancelCause, Counters, Event, FinishReason


class Scheduler:
    """Owns the waiting and the running requests of one slot table and pool."""

    def __init__(self, parts: SchedulerParts, table: SlotTable, pages: PageAllocator) -> None:
        self._parts = parts
        self._table = table
        self._prefixes = Prefixes(table, pages, parts.runner)
        self._room = Room(table, pages, self._prefixes, parts.failpoints)
        self._shifts = Shifts(self._room, table, parts.tokenizer, is_on=parts.shifts)
        self._queue = WaitingQueue()
        self._rows: dict[str, Row] = {}
        self._answers = Answers()
        self._erasures = Erasures(table, self._answers)
        transfers = parts.for_transfers(self._empty_all)
        self._transfers = Transfers(transfers, table, self._room, self._answers)
        self.adapter_changes = AdapterChanges(parts.adapters, self.num_users)
        self._ledger = Ledger()
        self._admission = Admission(
            AdmissionParts(
                parts=parts,
                table=table,
                prefixes=self._prefixes,
                room=self._room,
                queue=self._queue,
                rows=self._rows,
                ledger=self._ledger,
                on_failure=self._empty_if_lost,
            )
        )
        self._num_turns = 0
        self._is_stalled = False
        self._flight: Flight | None = None
        # While the pools are about to be replaced, what waits goes on waiting.
        self.is_open = True

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        waiting = len(self._queue) + len(self._erasures) + len(self.adapter_changes)
        return bool(self._rows) or waiting + self._transfers.num_waiting > 0

    @property
    def is_stalled(self) -> bool:
        """True while a step would find all that waits still waiting for what transfers hold.

        That changes with a command, of which the end of a transfer is one, or a deadline.
        """
        return self._is_stalled

    @property
    def next_deadline_s(self) -> float | None:
        """When the first waiting request expires; None if none ever does."""
        return self._queue.next_deadline_s

    @property
    def is_flowing(self) -> bool:
        """True while requests run and nothing else is due, so that the next step begins at once."""
        waiting = len(self._erasures) + len(self.adapter_changes) + self._transfers.num_waiting
        return bool(self._rows) and self.is_open and waiting + self.num_transfers == 0

    @property
    def num_transfers(self) -> int:
        """Saves and restores that other threads work on; their slots are not idle."""
        return self._transfers.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, pre-empted ones included."""
        return len(self._queue)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The running requests, in order of admission."""
        return tuple(sorted(self._rows.values(), key=lambda row: row.task_id))

    def num_users(self, adapter_id: int) -> int:
        """Returns how many requests that have begun run under a set with an adapter."""
        preempted = (arrival.row for arrival in self._queue.in_turn() if arrival.row)
        rows = (*self._rows.values(), *preempted)
        return sum(row.adapters.uses(adapter_id) for row in rows)

    @property
    def counters(self) -> Counters:
        """All totals since the start."""
        return replace(
            self._ledger.counters,
            evicted_slots=self._room.num_evicted,
            compiles=self._parts.runner.compiles,
        )

    def take_events(self) -> list[tuple[str, Event]]:
        """Returns the events since the last call, oldest first."""
        return self._ledger.take_events()

    def tell(self) -> None:
        """Answers whose slot was saved, restored or erased, now that the snapshot shows it."""
        self._answers.tell()

    def submit(self, request: Request, submitted_s: float, save: Save | None = None) -> None:
        """Queues a valid request whose id is not in use; a warming one with what it is for."""
        self._ledger.accepted(request, save)
        if save is not None and save.fail_if_busy:
            slot = self._table.slot(save.slot_id)
            if not slot.is_idle:
                self._ledger.failed(request, busy(slot), None)
                return
        arrival = Arrival(request, submitted_s, save=save)
        self._queue.push(arrival)
        self._admission.refuse_if_too_long(arrival)

    def transfer(self, wish: Save | Restore) -> None:
        """Saves or restores a slot from the next step on in which it is idle."""
        self._transfers.add(wish)

    def refuse_too_long(self) -> None:
        """Fails what waits and can never start, since the pool was made smaller."""
        for arrival in list(self._queue.in_turn()):
            self._admission.refuse_if_too_long(arrival)

    def cancel(self, request_id: str, cause: CancelCause) -> None:
        """Ends a request at once; one that has ended already is left alone."""
        row = self._rows.get(request_id)
        if row is not None:
            self._vacate(row)
            self._ledger.cancelled(row.request, cause, row)
            return
        arrival = self._queue.discard(request_id)
        if arrival is not None:
            self._ledger.cancelled(arrival.request, cause, arrival.row)

    def pass_over(self, request: Request) -> None:
        """Counts a prompt that was refused for its length as a use of the slot it would have got."""
        self._admission.pass_over(request)

    def erase(self, erasure: Erasure) -> None:
        """Erases a slot in the next step in which it is idle."""
        self._erasures.add(erasure)

    def refuse_waiting(
        self, make_error: Callable[[], Exception], *, begun_too: bool = False
    ) -> None:
        """Fails the requests that never started, or that wait at all, and whatever else waits."""
        for arrival in list(self._queue.in_turn()):
            if arrival.row is None or begun_too:
                self._admission.refuse(arrival, make_error())
        self._erasures.fail(make_error)
        self.adapter_changes.fail(make_error)
        self._transfers.refuse_waiting(make_error)

    def stop_transfers(self, make_error: Callable[[], Exception]) -> None:
        """Gives every save and restore up."""
        self._transfers.stop_all(make_error)

    def cancel_all(self, cause: CancelCause) -> None:
        """Ends every request."""
        waiting = [arrival.request.request_id for arrival in self._queue.in_turn()]
        for request_id in [*self._rows, *waiting]:
            self.cancel(request_id, cause)

    def begin_step(self) -> bool:
        """Ends what is over, admits what fits and hands one batch to the device.

        Returns False if there was none, or none that the device took. Otherwise `finish_step` must
        come next; until then nothing but events, counters and rows may be asked for.
        """
        now_s = self._parts.clock()
        self._expire(now_s)
        self._erasures.run()
        self.adapter_changes.run()
        if self.is_open:
            self._transfers.run()
            self._admission.admit_all(now_s)
        # With no row nothing below changes anything. What ended just now may have been waited for.
        is_over = not self._rows and not self._ledger.has_events and not self.adapter_changes
        self._is_stalled = is_over and self.num_transfers > 0
        self._shift_all()
        self._make_room()
        for row in self._rows.values():
            row.stop_at = self._table.next_stop(row.home, len(row.request.prompt))
        plan = self._plan()
        if plan is not None:
            self._start(plan)
        return self._flight is not None

    def finish_step(self) -> None:
        """Waits for the batch, samples its rows and ends what is through."""
        flight, self._flight = self._flight, None
        assert flight is not None, "no step was begun"
        try:
            results = flight.plan.results(flight.works, flight.step.results())
        except Exception as error:
            self._fail_step(flight.plan, error)
            return
        self._take(flight.plan, results)

    def _plan(self) -> StepPlan | None:
        runner = self._parts.runner
        most = min(self._parts.chunk_tokens, runner.max_chunk)
        if runner.max_texts:
            return plan_texts(self.rows, max_texts=runner.max_texts, max_tokens=most)
        return plan_step(self.rows, max_decodes=runner.max_decodes, chunk_tokens=most)

    # Ends of requests.

    def _expire(self, now_s: float) -> None:
        for arrival in self._queue.expired(now_s):
            self._queue.discard(arrival.request.request_id)
            error = deadline_error(arrival.request, arrival.submitted_s)
            self._ledger.failed(arrival.request, error, arrival.row)
        for row in self.rows:
            deadline_s = row.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._vacate(row)
                error = deadline_error(row.request, row.submitted_s)
                self._ledger.failed(row.request, error, row)

    def _vacate(self, row: Row) -> Slot:
        """Takes a row off its slot, which keeps what it holds."""
        slot = row.home
        if row.adapters.is_activated and slot.marked_from is not None:
            # What follows the invocation is no prefix of anybody's, nor what was moved of it.
            self._table.cut_back(slot, slot.marked_from)
        self._table.release(slot)
        row.slot = None
        del self._rows[row.request_id]
        if row.shelf is not None:
            row.shelf.put_back(slot)
            row.shelf = None
        return slot

    def _finish(self, row: Row, ending: Ending) -> None:
        slot = self._vacate(row)
        self._ledger.finished(row, ending, held=len(slot.tokens))

    def _finish_warming(self, row: Row, save: Save, now_s: float) -> None:
        """Saves what was computed; it stays in the slot only if that goes well."""
        shelf, row.shelf = row.shelf, None
        slot = self._vacate(row)
        self._ledger.warmed(row, held=len(slot.tokens), now_s=now_s)

        def end(is_saved: bool) -> None:
            if shelf is not None and is_saved:
                shelf.drop()
            elif shelf is not None:
                shelf.put_back(slot)

        self._transfers.begin_save(slot, save, end)

    def _fault(self, row: Row, cause: Exception, *, keep: bool) -> None:
        if not keep:
            self._table.discard(row.home, row.reused)
        self._vacate(row)
        self._ledger.failed(row.request, self._parts.as_engine_error(cause), row)

    def _lose(self, row: Row, cause: Exception, *, keep: bool) -> None:
        """Ends a row for which the device failed between steps."""
        self._fault(row, cause, keep=keep and not isinstance(cause, PoolLost))
        self._empty_if_lost(cause)

    # Room.

    def _shift_all(self) -> None:
        """Shifts every context that has no room for the token that is pending."""
        for row in self.rows:
            while row.request_id in self._rows and self._shifts.is_due(row):
                try:
                    if not self._shifts.shift(row) and not self._drop_shelf():
                        self._preempt(self.rows[-1])
                except Exception as error:
                    self._lose(row, error, keep=False)

    def _make_room(self) -> None:
        """Gives every row the pages that it lacks, the oldest first, at the youngest's expense."""
        for row in self.rows:
            if row.request_id not in self._rows or not self._room.is_short(row):
                continue
            if len(self._rows) > 1 and self._parts.failpoints.fires(Site.GROW):
                self._preempt(self.rows[-1])
            self._extend(row)

    def _extend(self, row: Row) -> None:
        while row.request_id in self._rows and not self._has_room(row):
            if self._drop_shelf():
                continue
            if len(self._rows) > 1:
                self._preempt(self.rows[-1])
            elif self._transfers.num_running and self._room.is_enough_for(row):
                self._preempt(row)  # the pages of a transfer are its own for a while only
            else:
                self._finish(row, Ending(FinishReason.CONTEXT_FULL, truncated=True))

    def _drop_shelf(self) -> bool:
        """Gives up what the youngest warming row's slot held before; False if nothing is kept."""
        for row in reversed(self.rows):
            if row.shelf is not None:
                row.shelf.drop()
                row.shelf = None
                return True
        return False

    def _has_room(self, row: Row) -> bool:
        try:
            return self._room.extend(row)
        except Exception as error:  # the device would not let go of what was to be evicted
            self._lose(row, error, keep=True)
            return True

    def _preempt(self, row: Row) -> None:
        slot = self._vacate(row)
        self._table.truncate(slot, 0)  # its prefix stays listed while its pages last
        row.start_again()
        self._queue.push_preempted(Arrival(row.request, row.submitted_s, row))
        self._ledger.preempted()

    # The step itself.

    def _start(self, plan: StepPlan) -> None:
        if self._table.windows is not None:
            for row in plan.rows:
                self._table.cover(row.home, len(row.home.tokens) + plan.length(row))
        works = plan.works()
        self._ledger.stepped(len(self._rows))
        try:
            self._parts.failpoints.check(Site.RUN)
            self._flight = Flight(plan, works, self._parts.runner.start(plan.batch(works)))
        except Exception as error:
            self._fail_step(plan, error)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        # Nobody knows what was written into these rows' pages, so nothing of them is kept.
        for row in plan.rows:
            self._fault(row, error, keep=False)
        self._empty_if_lost(error)

    def _take(
        self, plan: StepPlan, results: Sequence[tuple[Row, SequenceWork, RowLogits | None]]
    ) -> None:
        """Goes through what a step made of its rows."""
        now_s = self._parts.clock()
        if plan.passed is not None:
            plan.passed.was_passed = True
        for number, (row, work, logits) in enumerate(results):
            if row.slot is None:
                continue  # the pools were lost while another row's state was kept
            row.was_passed = False
            row.last_turn = self._num_turns
            self._num_turns += 1
            row.home.tokens += work.tokens
            self._table.slide(row.home, after_chunk=number >= len(plan.decodes))
            self._ledger.evaluated(row, now_s)
            if len(work.tokens) > 1 or row.is_new:  # others may use it from now on
                self._table.register(row.home, is_end=work.wants_logits)
            if row.stop_at == len(row.home.tokens) and not self._snapshot(row):
                continue
            if row.pooling is not None:
                self._pool(row, row.pooling, number if plan.texts else 0, now_s)
            elif work.wants_logits:
                self._sample(row, logits, now_s)

    def _snapshot(self, row: Row) -> bool:
        """Keeps the state of a prompt that has come to where that is due; False if that failed."""
        try:
            self._prefixes.snapshot(row.home)
        except Exception as error:
            self._lose(row, error, keep=True)
            return False
        return True

    def _pool(self, row: Row, pooling: StatePooling, text: int, now_s: float) -> None:
        """Gathers hidden states; with the last ones the vector is complete, and nothing is kept."""
        pooling.add(self._parts.runner.hidden_states(text))
        if row.num_pending:
            return
        vectors = pooling.result()
        try:
            self._require_finite(row, is_finite=bool(np.isfinite(vectors).all()))
        except Exception as error:
            self._fault(row, error, keep=False)
            return
        self._table.discard(row.home, row.reused)
        self._vacate(row)
        self._ledger.embedded(row, vectors, now_s)

    def _empty_if_lost(self, error: Exception) -> None:
        """Forgets every slot if no page holds anything; who runs starts its tokens again."""
        if isinstance(error, PoolLost):
            self._empty_all()

    def _empty_all(self) -> None:
        for row in self.rows:
            self._preempt(row)
        self._table.empty_all()

    def _sample(self, row: Row, logits: RowLogits | None, now_s: float) -> None:
        try:
            finite = _require(logits, row)
            self._require_finite(row, is_finite=finite.is_finite)
        except Exception as error:
            self._fault(row, error, keep=False)
            return
        if row.save is not None:
            self._finish_warming(row, row.save, now_s)
            return
        try:
            self._parts.failpoints.check(Site.SAMPLE)
            held = len(row.home.tokens)
            chunk, ending = row.generation.accept(finite, held=held, now_s=now_s)
        except Exception as error:
            self._fault(row, error, keep=True)
            return
        self._ledger.sampled(row, chunk)
        row.home.state = row.state
        if ending is not None:
            self._finish(row, ending)

    def _require_finite(self, row: Row, *, is_finite: bool) -> None:
        """Raises if what a row's last step made, logits or a vector, is not finite."""
        if self._parts.failpoints.fires(Site.LOGITS):
            raise NonFiniteLogits(f"what the device made of request {row.request_id} is not finite")
        if not is_finite:
            raise not_finite(row)


def _require(logits: RowLogits | None, row: Row) -> RowLogits:
    if logits is None:
        raise NonFiniteLogits(f"the runner returned no logits for request {row.request_id}")
    return logits

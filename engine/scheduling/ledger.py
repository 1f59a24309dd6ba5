"""What a step reports: events in order, and the totals that every metric and usage comes from.

The one place that makes events, so that events and counters cannot disagree.
"""

from __future__ import annotations

from dataclasses import asdict

from engine.errors import DeadlineExceeded, ShuttingDown
from engine.generation import Ending
from engine.requests import Request
from engine.scheduling.row import Arrival, Row
from engine.scheduling.wishes import Save, fail
from engine.step import FloatArray
from engine.types import (
    CacheSource,
    CancelCause,
    Cancelled,
    Chunk,
    Counters,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Started,
)


class Ledger:
    """The events since they were last taken, and all totals."""

    def __init__(self) -> None:
        # Summed in place: frozen counters would be copied several times per token.
        self._totals = asdict(Counters())
        self._events: list[tuple[str, Event]] = []
        self._saves: dict[str, Save] = {}  # of warming requests that have not ended

    @property
    def counters(self) -> Counters:
        """All totals since the start."""
        return Counters(**self._totals)

    @property
    def has_events(self) -> bool:
        """Whether there are events that were not taken."""
        return bool(self._events)

    def take_events(self) -> list[tuple[str, Event]]:
        """Returns the new events, oldest first."""
        events, self._events = self._events, []
        return events

    def accepted(self, request: Request, save: Save | None = None) -> None:
        """Counts a request that entered the queue: exactly one last event will follow.

        If that is not `warmed`, it is also the end of what the request is to be saved with.
        """
        self._count(requests_started=1)
        if save is not None:
            self._saves[request.request_id] = save

    def started(self, row: Row, *, seed: int, source: CacheSource, no_reuse: str) -> None:
        """Reports a row's first admission."""
        self._send(
            row.request_id,
            Started(
                slot_id=row.home.slot_id,
                prompt_tokens=len(row.request.prompt),
                cached_tokens=row.cached_tokens,
                cache_source=source,
                no_reuse=no_reuse,
                adapters=row.adapters.scales,
                seed=seed,
            ),
        )
        self._count(prompt_tokens_cached=row.cached_tokens)
        if row.request.progress:
            self._progress(row, row.admitted_s)

    def stepped(self, num_rows: int) -> None:
        """Counts a step."""
        self._count(steps=1, busy_slot_steps=num_rows)

    def evaluated(self, row: Row, now_s: float) -> None:
        """Counts what a step added to a row's slot; a second prefill adds and shows nothing."""
        held = len(row.home.tokens)
        self._totals["max_held_tokens"] = max(self._totals["max_held_tokens"], held)
        new = min(held, len(row.request.prompt)) - row.prompt_done
        if new <= 0:
            return
        row.prompt_done += new
        self._count(prompt_tokens_evaluated=new)
        if row.request.progress:
            self._progress(row, now_s)

    def sampled(self, row: Row, chunk: Chunk) -> None:
        """Reports a sampled token."""
        self._count(generated_tokens=1)
        self._send(row.request_id, chunk)

    def preempted(self) -> None:
        """Counts a pre-emption; the client sees none of it."""
        self._count(preemptions=1)

    def finished(self, row: Row, ending: Ending, *, held: int) -> None:
        """Reports the end of a request that was served; `held` tokens stay in its slot."""
        generation = row.generation
        prefill_s = _prefill_s(row)
        self._send(
            row.request_id,
            Finished(
                reason=ending.reason,
                prompt_tokens=len(row.request.prompt),
                cached_tokens=row.cached_tokens,
                completion_tokens=len(generation.tokens),
                held_tokens=held,
                unsent_text=generation.unsent(),
                has_new_line=generation.has_new_line,
                truncated=ending.truncated or row.is_shifted,
                queue_s=row.admitted_s - row.submitted_s,
                prefill_s=prefill_s,
                decode_s=generation.decode_s,
                stop_string=ending.stop_string,
                stop_token_id=ending.stop_token_id,
                indent_cut_chars=generation.indent_cut_chars,
            ),
        )
        self._count(requests_finished=1, prefill_s=prefill_s, decode_s=generation.decode_s)
        self._give_up_save(row.request)

    def warmed(self, row: Row, *, held: int, now_s: float) -> None:
        """Reports the end of a request whose prompt was only computed."""
        prefill_s = now_s - row.admitted_s
        self._saves.pop(row.request_id, None)
        self._send(
            row.request_id,
            Finished(
                reason=FinishReason.LENGTH,
                prompt_tokens=len(row.request.prompt),
                cached_tokens=row.cached_tokens,
                completion_tokens=0,
                held_tokens=held,
                unsent_text="",
                has_new_line=False,
                truncated=False,
                queue_s=row.admitted_s - row.submitted_s,
                prefill_s=prefill_s,
                decode_s=0.0,
            ),
        )
        self._count(requests_finished=1, prefill_s=prefill_s)

    def embedded(self, row: Row, vectors: FloatArray, now_s: float) -> None:
        """Reports a vector; `vectors` are f32 [rows, width]."""
        num_rows, dimension = vectors.shape
        values = vectors.astype("<f4").tobytes()
        self._send(row.request_id, Embedded(values, num_rows, dimension, len(row.request.prompt)))
        self._count(requests_finished=1, prefill_s=now_s - row.admitted_s)

    def nothing_to_do(self, arrival: Arrival, *, slot_id: int, held: int, now_s: float) -> None:
        """Reports a request with an empty prompt: started and finished without a step."""
        name = arrival.request.request_id
        self._send(name, Started(slot_id, 0, 0, CacheSource.NONE, "the prompt is empty", (), 0))
        self._send(
            name,
            Finished(
                reason=FinishReason.EMPTY_PROMPT,
                prompt_tokens=0,
                cached_tokens=0,
                completion_tokens=0,
                held_tokens=held,
                unsent_text="",
                has_new_line=False,
                truncated=False,
                queue_s=now_s - arrival.submitted_s,
                prefill_s=0.0,
                decode_s=0.0,
            ),
        )
        self._count(requests_finished=1)
        self._give_up_save(arrival.request)

    def failed(self, request: Request, error: Exception, row: Row | None) -> None:
        """Reports a failure; `row` is what the request had done, None if it never started.

        A deadline and the server's end are nobody's fault: they count as cancellations.
        """
        self._send(request.request_id, Failed(error))
        if isinstance(error, DeadlineExceeded | ShuttingDown):
            self._count(requests_cancelled=1)
        else:
            self._count(requests_failed=1)
        self._count_times(row)
        save = self._saves.pop(request.request_id, None)
        if save is not None:
            fail(save, error)

    def cancelled(self, request: Request, cause: CancelCause, row: Row | None) -> None:
        """Reports a cancellation; `row` is what the request had done, None if it never started."""
        self._send(request.request_id, Cancelled(cause))
        self._count(requests_cancelled=1)
        self._count_times(row)
        self._give_up_save(request)

    def _give_up_save(self, request: Request) -> None:
        save = self._saves.pop(request.request_id, None)
        if save is not None:
            save.done.cancel()

    def _count_times(self, row: Row | None) -> None:
        if row is not None:
            self._count(prefill_s=_prefill_s(row), decode_s=row.generation.decode_s)

    def _progress(self, row: Row, now_s: float) -> None:
        total = len(row.request.prompt)
        elapsed_s = now_s - row.admitted_s
        self._send(row.request_id, Progress(total, row.cached_tokens, row.prompt_done, elapsed_s))

    def _send(self, request_id: str, event: Event) -> None:
        self._events.append((request_id, event))

    def _count(self, **more: float) -> None:
        for name, amount in more.items():
            self._totals[name] += amount


def _prefill_s(row: Row) -> float:
    first = row.generation.first_token_s
    return 0.0 if first is None else first - row.admitted_s

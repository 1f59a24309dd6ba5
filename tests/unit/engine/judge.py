"""What the clients of a simulated engine were told, held against a model of a solo run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.failpoints import InjectedFault
from engine.requests import Request
from engine.scheduler import NonFiniteLogits
from engine.step import PoolLost
from engine.types import (
    CacheSource,
    Cancelled,
    Chunk,
    Embedded,
    EngineConfig,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    SlotState,
    Snapshot,
    Started,
)
from tests.unit.engine.adapter_life import AdapterLife
from tests.unit.engine.slot_life import SlotLife
from tests.unit.engine.solo_model import STOP, TOKENIZER, SoloModel, SoloRun

_INJECTED = (InjectedFault, NonFiniteLogits, MemoryError, PoolLost)


@dataclass
class Life:
    """What one accepted request has shown so far.

    `is_marked`: it went on from what its slot held behind a shift, so no cold run is like it.
    """

    request: Request
    order: int
    started: Started | None = None
    progress: list[Progress] = field(default_factory=list[Progress])
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    end: Finished | Failed | Cancelled | None = None
    cancelled_in: SlotState | None = None
    is_marked: bool = False


@dataclass(frozen=True)
class Scene:
    """What the judge knows of the engine.

    `window` in tokens, None without; `kv_sizes` are all sizes that the kv pool has had, in pages;
    `has_had_faults` says whether any was injected yet.
    """

    config: EngineConfig
    context_tokens: int
    window: int | None
    is_recurrent: bool
    kv_sizes: Callable[[], set[int]]
    snapshot: Callable[[], Snapshot]
    has_had_faults: Callable[[], bool]


class Judge:
    """All lives of one engine's requests; raises AssertionError at the first that is wrong."""

    def __init__(
        self, scene: Scene, adapters: AdapterLife, slots: SlotLife, seen: Counter[str]
    ) -> None:
        self.lives: dict[str, Life] = {}
        # The slot that a request was last seen on.
        self.homes: dict[str, int] = {}
        self._scene = scene
        self._adapters = adapters
        self._slots = slots
        self._seen = seen
        self._solo_model = SoloModel(
            scene.context_tokens, scene.window, shifts=scene.config.context_shift
        )

    @property
    def living(self) -> list[Life]:
        """The requests that have not ended."""
        return [life for life in self.lives.values() if life.end is None]

    def is_unfinished(self, request: Request) -> bool:
        """Whether a request was not served to its end."""
        return not isinstance(self.lives[request.request_id].end, Finished)

    def on_events(self, events: Sequence[tuple[str, Event]]) -> None:
        """Takes what the engine reports, in order."""
        assert events
        for request_id, event in events:
            life = self.lives[request_id]
            assert life.end is None, f"{request_id}: {event} after its last event"
            match event:
                case Started():
                    self._on_started(life, event)
                case Progress():
                    life.progress.append(event)
                case Chunk():
                    assert life.started is not None
                    life.chunks.append(event)
                    assert event.completion_tokens == len(life.chunks), "a token was sent twice"
                case Finished() | Failed() | Cancelled():
                    life.end = event
                    self._judge(life, event)
                case Embedded():
                    raise AssertionError(f"{request_id}: nobody asked for a vector")

    def _on_started(self, life: Life, started: Started) -> None:
        assert life.started is None, "a request started twice"
        life.started = started
        request = life.request
        self._adapters.check_started(request, started, self._scene.snapshot())
        if request.slot_id is not None:
            assert started.slot_id == request.slot_id
        assert started.cached_tokens <= max(0, len(request.prompt) - 1)
        assert (started.cached_tokens == 0) == bool(started.no_reuse)
        assert request.cache_prompt or started.cached_tokens == 0
        if started.cached_tokens:
            self._seen["reused" if self._scene.window is None else "reused:window"] += 1
            self._seen[f"reused:{started.cache_source.value}"] += 1
        self._slots.note_start(started.slot_id, is_own=started.cache_source is CacheSource.SLOT)
        if started.cache_source is CacheSource.SLOT:
            life.is_marked = started.slot_id in self._slots.marked
            self._seen["marked"] += life.is_marked
        elif request.prompt and not request.is_warming:  # after which the old state may return
            self._slots.marked.discard(started.slot_id)
        if started.cache_source is CacheSource.SLOT:
            owners = self._slots.owners_of(started.slot_id)
            assert request.tenant in owners, "another tenant's prefix"
        if self._scene.is_recurrent and started.cached_tokens:
            self._seen[f"reused:state:{started.cache_source.value}"] += 1
        if "recurrent state" in started.no_reuse:
            self._seen["state_gone"] += 1
        if "window" in started.no_reuse:
            self._seen["window_gone"] += 1
        if request.slot_id is None:
            for other in self.lives.values():
                overtaken = (
                    other.order < life.order
                    and other.started is None
                    and other.end is None
                    and other.request.slot_id is None
                    and other.request.tenant == request.tenant
                )
                assert not overtaken, "first come was not first served"

    def _judge(self, life: Life, end: Finished | Failed | Cancelled) -> None:
        tokens = [chunk.token_id for chunk in life.chunks]
        self._note_marks(life)
        if not life.request.prompt:
            assert not tokens
        elif not life.is_marked:
            expected = self._solo(life)
            assert tokens == expected.tokens[: len(tokens)], "not the tokens of a solo run"
        match end:
            case Finished():
                self._seen[f"finished:{end.reason.value}"] += 1
                self._judge_finished(life, end, tokens)
            case Failed(error=error):
                assert isinstance(error, EngineError), error
                self._seen[f"failed:{error.reason}"] += 1
                if error.reason == "ENGINE_FAULT":
                    # The fake runner's own complaints are assertions, and never an answer.
                    assert isinstance(error.__cause__, _INJECTED), error.__cause__
                    self._seen[f"fault:{type(error.__cause__).__name__}"] += 1
                    assert self._scene.has_had_faults()
            case Cancelled():
                assert life.cancelled_in is not None

    def _note_marks(self, life: Life) -> None:
        evaluated = len(life.request.prompt) + len(life.chunks) - 1
        if life.started is None or evaluated < self._scene.context_tokens - 1:
            return
        request = life.request
        served = (s.slot_id for s in self._scene.snapshot().slots if s.request is request)
        self._slots.marked.update(served)
        self._slots.marked.add(self.homes.get(request.request_id, life.started.slot_id))

    def _judge_finished(self, life: Life, end: Finished, tokens: list[int]) -> None:
        request = life.request
        assert life.started is not None
        assert end.prompt_tokens == len(request.prompt) == life.started.prompt_tokens
        assert end.cached_tokens == life.started.cached_tokens
        assert end.completion_tokens == len(tokens)
        if not request.prompt:
            assert end.reason is FinishReason.EMPTY_PROMPT
            return
        evaluated = len(request.prompt) + len(tokens) - 1
        activated_from = self._adapters.history(request, life.started)[1]
        if request.is_warming:
            self._seen["warmed"] += 1
            assert not tokens
            assert activated_from or end.held_tokens == len(request.prompt)
            return
        if activated_from:
            assert end.held_tokens <= min(evaluated, activated_from), "an activated tail was kept"
        elif evaluated < self._scene.context_tokens:
            assert end.held_tokens == evaluated
        elif end.reason is not FinishReason.CONTEXT_FULL:
            self._seen["shifted"] += 1
            assert end.truncated
            assert end.held_tokens < self._scene.context_tokens
        self._judge_reason(life, end, tokens)
        text = "".join(chunk.text for chunk in life.chunks) + end.unsent_text
        expected = TOKENIZER.decode(tokens, render_special=False).decode(errors="replace")
        if end.reason is FinishReason.STOP:
            expected = expected[: expected.index(STOP)]
        if not end.truncated:
            assert text == expected
        if request.progress:
            processed = [progress.processed for progress in life.progress]
            assert processed == sorted(set(processed)), "progress went back"
            assert processed[0] == end.cached_tokens
            assert processed[-1] == end.prompt_tokens
            # cached + evaluated = prompt: what was processed beyond the cache was evaluated once.
            assert {progress.total for progress in life.progress} == {end.prompt_tokens}

    def _solo(self, life: Life) -> SoloRun:
        return self._solo_model.run(
            life.request, *self._adapters.history(life.request, life.started)
        )

    def _judge_reason(self, life: Life, end: Finished, tokens: list[int]) -> None:
        if life.is_marked:
            return
        expected = self._solo(life)
        if end.reason is expected.reason and len(tokens) == len(expected.tokens):
            return
        # Alone in a pool smaller than its context, a request ends when the pool is full.
        assert end.reason is FinishReason.CONTEXT_FULL
        assert end.truncated
        page_tokens = self._scene.config.page_tokens
        full = len(life.request.prompt) + len(tokens) - 1
        assert full % page_tokens == 0
        assert full // page_tokens in self._scene.kv_sizes()
        self._seen["finished:pool_full"] += 1

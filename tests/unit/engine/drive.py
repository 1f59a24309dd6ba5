"""Drives the real engine step by step over the fakes and keeps what every request was told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from engine.failpoints import Failpoints
from engine.memory.planner import plan_memory
from engine.memory.split import MemoryLimits, PoolSizes
from engine.model.scoring import ScoringHead
from engine.rebuild import RebuildReport, RebuildWish
from engine.requests import Request
from engine.types import (
    Cancelled,
    Chunk,
    EngineConfig,
    Event,
    Failed,
    Finished,
    PoolInfo,
    PoolKind,
    Progress,
    Started,
)
from tests.fake_logits import model_logits
from tests.fake_text import FakeTokenizer
from tests.fakes import FakeClock, fake_engine, fake_shape, fitting_runner

A, B = 67, 68


def ask(
    name: str,
    prompt: Sequence[int] = (A, B, A),
    max_tokens: int | None = 5,
    *,
    slot_id: int | None = None,
    tenant: str = "",
    cache_prompt: bool = True,
    progress: bool = False,
    deadline_s: float | None = None,
    group: str = "",
    n_keep: int = 0,
    n_discard: int = 0,
    n_cache_reuse: int = 0,
) -> Request:
    return Request(
        name,
        tuple(prompt),
        max_tokens=max_tokens,
        ignore_eos=True,
        slot_id=slot_id,
        tenant=tenant,
        cache_prompt=cache_prompt,
        progress=progress,
        deadline_s=deadline_s,
        group=group,
        n_keep=n_keep,
        n_discard=n_discard,
        n_cache_reuse=n_cache_reuse,
    )


def solo(prompt: Sequence[int], count: int, window: int | None = None) -> list[int]:
    """The fake model's greedy answer, without an engine."""
    history = list(prompt)
    for _ in range(count):
        logits = model_logits(history, FakeTokenizer().vocab_size, window)
        logits[1] = -np.inf
        history.append(int(logits.argmax()))
    return history[len(prompt) :]


class Drive:
    """An engine that is never started, so that every step is the test's."""

    def __init__(
        self,
        *,
        num_slots: int = 2,
        context_tokens: int = 64,
        kv_pages: int = 32,
        page_tokens: int = 4,
        chunk_tokens: int = 16,
        queue_requests: int = 256,
        max_decodes: int = 16,
        max_chunk: int = 64,
        failpoints: Failpoints | None = None,
        next_token: Callable[[Sequence[int]], int] | None = None,
        window: int | None = None,
        swa_evict_interval: int = 8,
        mamba_slots: int | None = None,
        snapshot_interval: int = 32,
        host_cache_bytes: int | None = 0,
        context_shift: bool = False,
        embeds: bool = False,
        limit_bytes: int = 1 << 40,
        max_texts: int = 0,
        head: ScoringHead | None = None,
        num_experts: int = 0,
        sleep_idle_s: float | None = None,
        available_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        config = EngineConfig(
            context_tokens=context_tokens,
            num_slots=num_slots,
            page_tokens=page_tokens,
            chunk_tokens=chunk_tokens,
            kv_pages=kv_pages,
            queue_requests=queue_requests,
            swa_evict_interval=swa_evict_interval,
            mamba_slots=mamba_slots,
            snapshot_interval=snapshot_interval,
            host_cache_bytes=host_cache_bytes,
            context_shift=context_shift,
            embeds=embeds,
            sleep_idle_s=sleep_idle_s,
        )
        is_recurrent = mamba_slots is not None
        self.plan = plan_memory(config, fake_shape(window, is_recurrent), context_tokens)
        self.clock = FakeClock()
        self.runner = fitting_runner(self.plan, num_experts)
        self.runner.max_decodes = max_decodes
        self.runner.max_chunk = max_chunk
        self.runner.max_texts = max_texts
        self.runner.next_token = next_token
        self.runner.keep_batches = True
        self.events: list[tuple[str, Event]] = []
        self._told: defaultdict[str, list[Event]] = defaultdict(list)
        self.num_calls = 0
        self.side: list[Callable[[], None]] = []
        self.engine = fake_engine(
            self._on_events,
            config=config,
            runner=self.runner,
            clock=self.clock,
            failpoints=failpoints,
            training_tokens=context_tokens,
            window=window,
            is_recurrent=is_recurrent,
            start_compiling=self.side.append,
            memory=MemoryLimits("fake", fixed_bytes=1000, limit_bytes=limit_bytes),
            head=head,
            available_bytes=available_bytes,
        )

    def on_the_side(self) -> Drive:
        """Does what other threads would have done by now."""
        work, self.side[:] = list(self.side), []
        for each in work:
            each()
        return self

    def rebuild(
        self,
        target: PoolSizes,
        *,
        drain_s: float = 0.0,
        validate_only: bool = False,
        request_id: str = "rebuild",
    ) -> Future[RebuildReport]:
        """Asks for a rebuild; its programs are compiled within the first of two steps."""
        wish = RebuildWish(target, request_id, drain_s, validate_only)
        done = self.engine.rebuild(wish)
        self.steps()
        self.on_the_side().steps(2)
        return done

    def _on_events(self, events: Sequence[tuple[str, Event]]) -> None:
        self.num_calls += 1
        self.events += events
        for name, event in events:
            self._told[name].append(event)
        for _, event in events:
            cause = event.error.__cause__ if isinstance(event, Failed) else None
            if isinstance(cause, AssertionError):
                raise cause  # the fake runner's complaint, which a request's failure would hide

    def steps(self, count: int = 1) -> Drive:
        for _ in range(count):
            self.engine.step()
            self.engine.check_integrity()
        return self

    def rest(self, limit: int = 1000) -> Drive:
        """Steps until nothing runs or waits, then checks that idle means empty."""
        for _ in range(limit):
            self.steps()
            now = self.engine.snapshot()
            if now.running == now.queued == 0:
                break
        else:
            raise AssertionError("the engine did not come to rest")
        for pool in now.pools:
            assert pool.used == 0
            assert pool.free + pool.pinned + pool.cached == pool.size
        return self

    def of(self, request_id: str) -> list[Event]:
        return list(self._told[request_id])

    def started(self, request_id: str) -> Started:
        (event,) = [event for event in self.of(request_id) if isinstance(event, Started)]
        return event

    def has_started(self, request_id: str) -> bool:
        return any(isinstance(event, Started) for event in self.of(request_id))

    def chunks(self, request_id: str) -> list[Chunk]:
        return [event for event in self.of(request_id) if isinstance(event, Chunk)]

    def tokens(self, request_id: str) -> list[int]:
        return [chunk.token_id for chunk in self.chunks(request_id)]

    def progress(self, request_id: str) -> list[int]:
        return [event.processed for event in self.of(request_id) if isinstance(event, Progress)]

    def pool(self, kind: PoolKind) -> PoolInfo:
        (pool,) = [pool for pool in self.engine.snapshot().pools if pool.kind is kind]
        return pool

    def end(self, request_id: str) -> Finished | Failed | Cancelled | None:
        ends = [e for e in self.of(request_id) if isinstance(e, Finished | Failed | Cancelled)]
        assert len(ends) <= 1, "more than one last event"
        return ends[0] if ends else None

    def finished(self, request_id: str) -> Finished:
        end = self.end(request_id)
        assert isinstance(end, Finished), end
        return end

    def error(self, request_id: str) -> Exception:
        end = self.end(request_id)
        assert isinstance(end, Failed), end
        return end.error

"""A seeded random life of the real engine over fakes, judged against a model of a solo run.

`Simulation(seed)` draws everything from one generator, so a seed replays exactly. `run` drives
random commands with faults, then turns the faults off and demands that all comes to rest.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from engine.errors import EngineError
from engine.failpoints import Failpoints, InjectedFault, Site
from engine.memory.planner import WINDOW_SLACK_TOKENS, plan_memory
from engine.scheduler import NonFiniteLogits
from engine.scheduling.erasing import ErasedSlot
from engine.step import PoolLost
from engine.types import (
    AdapterScale,
    CacheSource,
    CancelCause,
    Cancelled,
    Chunk,
    Embedded,
    EngineConfig,
    Event,
    Failed,
    Finished,
    FinishReason,
    PoolKind,
    Progress,
    Request,
    SamplingParams,
    SlotState,
    Snapshot,
    Started,
)
from tests.fakes import (
    EXPERTS,
    FakeClock,
    fake_engine,
    fake_shape,
    fitting_runner,
)
from tests.unit.engine.adapter_life import AdapterLife
from tests.unit.engine.lockstep import lockstep
from tests.unit.engine.pool_life import PoolLife
from tests.unit.engine.slot_life import SlotLife, is_in_transfer
from tests.unit.engine.solo_model import STOP, TOKENIZER, SoloModel, SoloRun

LIVENESS_STEPS = 1000
_LETTERS = TOKENIZER.encode("ab", add_special=False, parse_special=False)
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


class Simulation:
    """One engine, its clients and the judge."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        # Most sites are passed in every step: firing often there, nothing would ever finish.
        self.failpoints = Failpoints.seeded(random.Random(seed + 1), fire=0.02)
        for site in self.failpoints.armed:
            if site is Site.GROW or site.value.startswith("rebuild"):
                self.failpoints.armed[site] = 0.25
        self.config, training_tokens = self._draw_config()
        # A third of all models have sliding windows, some of them wider than any context here.
        self.window = self.rng.choice([None] * 8 + [1, 3, 8, 20, 200])
        # Of the others some have recurrent layers, with and without room for snapshots.
        self.is_recurrent = self.window is None and self.rng.random() < 0.4
        if self.is_recurrent:
            self.config = replace(
                self.config,
                mamba_slots=self.config.num_slots + self.rng.choice([0, 1, 3, 10]),
                snapshot_interval=self.rng.choice([4, 16, 1024]),
            )
        elif self.window is None and self.rng.random() < 0.4:
            self.config = replace(self.config, context_shift=True)
        self.lives: dict[str, Life] = {}
        self.seen: Counter[str] = Counter()
        self._erasures: list[Future[ErasedSlot]] = []
        self.slots = SlotLife(seed + 4)
        self._slot_tenants = self.slots.tenants
        self._marked_slots = self.slots.marked
        self.adapters = AdapterLife(seed + 2, _LETTERS)
        self.pools = PoolLife(seed + 3)
        self._homes: dict[str, int] = {}
        self._is_faulty = True
        self._num_faults = 0
        self.plan = plan_memory(
            self.config, fake_shape(self.window, self.is_recurrent), training_tokens
        )
        # Some have experts, all in memory or not.
        num_experts = self.rng.choice([0, 0, EXPERTS.floor, EXPERTS.ceiling])
        self.runner = fitting_runner(self.plan, num_experts)
        self.runner.max_decodes = self.rng.randint(1, self.config.num_slots)
        self.runner.max_chunk = self.rng.choice([4, 16, 64])
        self.runner.piece_bytes = self.rng.choice([1, 3 << 20])
        self.engine = fake_engine(
            self._on_events,
            config=self.config,
            runner=self.runner,
            clock=self.clock,
            failpoints=self.failpoints,
            training_tokens=training_tokens,
            window=self.window,
            num_adapters=self.adapters.num_places,
            is_recurrent=self.is_recurrent,
            start_compiling=self.pools.start,
            start_file_work=self.slots.start,
        )
        self.slots.attach(self.engine, self.runner, self.plan)
        self.context_tokens = self.plan.slot_context_tokens
        self.solo = SoloModel(self.context_tokens, self.window, shifts=self.config.context_shift)

    def run(self, num_commands: int) -> None:
        """Lives through the commands, then comes to rest without faults."""
        with lockstep():
            for _ in range(num_commands):
                self._command()
                self._step()
            self._come_to_rest()

    def _draw_config(self) -> tuple[EngineConfig, int]:
        rng = self.rng
        page_tokens = rng.choice([4, 8, 16])
        context_tokens = rng.choice([24, 48, 96])
        num_slots = rng.randint(1, 5)
        slot_pages = -(-context_tokens // page_tokens)
        config = EngineConfig(
            context_tokens=context_tokens,
            num_slots=num_slots,
            page_tokens=page_tokens,
            chunk_tokens=rng.choice([1, 5, 16, 64]),
            kv_pages=rng.randint(max(2, slot_pages // 2), slot_pages * max(2, num_slots // 2)),
            slot_similarity=rng.choice([0.0, 0.1, 0.5]),
            host_cache_bytes=rng.choice([0, 0, 200_000, None]),
            queue_requests=rng.randint(1, 12),
            queue_bytes=rng.choice([1 << 20, 1500]),
            swa_evict_interval=rng.choice([1, 4, 20, 128]),
        )
        return config, context_tokens

    # Commands.

    def _command(self) -> None:
        draw = self.rng.random()
        if draw < 0.35:
            self._submit(self._draw_request())
        elif draw < 0.45:
            self._cancel()
        elif draw < 0.52:
            self._erase()
        elif draw < 0.62:
            self.clock.advance(self.rng.choice([0.001, 0.1, 3.0]))
        elif draw < 0.64:
            self._submit(self._draw_bad_request())
        elif draw < 0.65:
            self._break_runner()
        elif draw < 0.75:
            self.adapters.command(self.engine)
        elif draw < 0.80:
            self.pools.command(self.engine, self.clock, is_faulty=self._is_faulty)
        elif draw < 0.92:
            warming = self.slots.command(self._draw_request)
            if warming is not None:
                self._submit(warming)

    def _draw_request(self) -> Request:
        rng = self.rng
        length = min(rng.choice([1, 3, 8, 20, 60, 90]), self.context_tokens - 1)
        # Few letters and repeated heads, so that slots often hold a prefix of the next prompt.
        head = [_LETTERS[0]] * (length * rng.randint(0, 4) // 4)
        tail = rng.choices(_LETTERS, k=length - len(head))
        prompt = tuple(head + tail) if rng.random() > 0.03 else ()
        return Request(
            request_id=f"r{len(self.lives)}-{rng.randrange(1 << 30)}",
            prompt=self._continuation() if rng.random() < 0.2 else prompt,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=rng.choice([self._longest, 0, 1, 5, 20, 100]),
            n_keep=rng.choice([0, 0, 3, -1, 1000]),
            n_discard=rng.choice([0, 0, 1, 7, 1000]),
            stop=rng.choice([(), (STOP,)]),
            ignore_eos=rng.random() < 0.5,
            slot_id=rng.choice([None, None, rng.randrange(self.config.num_slots)]),
            cache_prompt=rng.random() > 0.1,
            progress=rng.random() < 0.5,
            deadline_s=self.clock() + rng.choice([0.0, 0.05, 5.0]) if rng.random() < 0.1 else None,
            tenant=rng.choice(["", "", "a", "b"]),
            adapters=self.adapters.draw_set(),
        )

    @property
    def _longest(self) -> int | None:
        """A budget that ends: with shifts nothing else might."""
        return 150 if self.config.context_shift else None

    def _continuation(self) -> tuple[int, ...]:
        """A conversation's next turn: a past prompt with its answer."""
        if not self.lives:
            return (TOKENIZER.bos_token,)
        life = self.rng.choice(list(self.lives.values()))
        turn = (*life.request.prompt, *(chunk.token_id for chunk in life.chunks), _LETTERS[1])
        return turn[: self.context_tokens - 1]

    def _draw_bad_request(self) -> Request:
        rng = self.rng
        bad = [
            Request("bad", (TOKENIZER.vocab_size,)),
            Request("bad", (_LETTERS[0],) * self.context_tokens),
            Request("bad", (1,), slot_id=self.config.num_slots),
            Request("bad", (1,), sampling=SamplingParams(top_p=float("nan"))),
            Request("bad", (1,), adapters=(AdapterScale(10**6, 1.0),)),
        ]
        running = [life.request for life in self.lives.values() if life.end is None]
        return rng.choice([*bad, *running[:1]])

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request, save=self.slots.take_save(request))
        except EngineError as error:
            self.seen[f"refused:{error.reason}"] += 1
            self.slots.forget(request)
            return
        assert request.request_id not in self.lives or self.lives[request.request_id].end
        self.lives[request.request_id] = Life(request, order=len(self.lives))

    def _cancel(self) -> None:
        living = [life for life in self.lives.values() if life.end is None]
        if not living or self.rng.random() < 0.1:
            self.engine.cancel("nobody", CancelCause.CLIENT)
            return
        life = self.rng.choice(living)
        state = "queued"
        if life.started is not None:
            state = "decode" if life.chunks else "prefill"
        self.seen[f"cancelled:{state}"] += 1
        life.cancelled_in = SlotState.IDLE
        self.engine.cancel(life.request.request_id, self.rng.choice(list(CancelCause)))

    def _erase(self) -> None:
        rng = self.rng
        done = self.engine.erase_slot(
            rng.randrange(self.config.num_slots),
            fail_if_busy=rng.random() < 0.3,
            tenant=rng.choice([None, "", "a"]),
        )
        self._erasures.append(done)
        if rng.random() < 0.1:
            done.cancel()

    def _break_runner(self) -> None:
        if self._is_faulty:
            error = self.rng.choice([MemoryError, PoolLost])("the device is out of memory")
            if self.rng.random() < 0.5:
                self.runner.fail_with = error
            else:
                self.runner.fail_transfer_with = error
            self._num_faults += 1

    # Judgement.

    def _step(self) -> None:
        now_s = self.clock()
        self.pools.work()
        self.slots.work()
        assert self.engine.step()
        self.engine.check_integrity()
        self._check_snapshot(self.engine.snapshot())
        for life in self.lives.values():
            if life.end is None:
                assert life.cancelled_in is None, "a cancelled request survived a step"
                deadline_s = life.request.deadline_s
                assert deadline_s is None or deadline_s > now_s, "a deadline was missed"

    def _check_snapshot(self, now: Snapshot) -> None:
        assert [pool.kind for pool in now.pools] == self._pool_kinds()
        self.pools.check(now)
        for pool in now.pools:
            assert pool.free + pool.used + pool.pinned + pool.cached == pool.size
            assert min(pool.free, pool.used, pool.pinned, pool.cached) >= 0
            is_busy = now.running or is_in_transfer(now)
            assert is_busy or pool.used == 0, "idle means empty"
        assert now.queued <= self.config.queue_requests + self.config.num_slots
        living = sum(life.end is None for life in self.lives.values())
        assert now.running + now.queued == living
        for slot in now.slots:
            assert slot.held_tokens <= slot.context_tokens
            if slot.request is not None:
                self._homes[slot.request.request_id] = slot.slot_id
            tenant = self.slots.tenant_of(slot)
            if tenant is not None:
                self._slot_tenants[slot.slot_id] = tenant
        counters = now.counters
        ended = counters.requests_finished + counters.requests_failed + counters.requests_cancelled
        assert counters.requests_started == ended + living
        self._check_windows(now)
        running = [life.started for life in self.lives.values() if life.started and not life.end]
        self.adapters.check(now, running, self.runner)

    def _pool_kinds(self) -> list[PoolKind]:
        kinds = [PoolKind.KV]
        kinds += [PoolKind.SWA] if self.window is not None else []
        kinds += [PoolKind.MAMBA] if self.is_recurrent else []
        return kinds + ([PoolKind.MOE_CACHE] if self.runner.num_experts else [])

    def _check_windows(self, now: Snapshot) -> None:
        """A slot has no more than its window, or when it decodes its share of the floor."""
        if self.window is None:
            return
        pool = now.pools[1]
        share = pool.floor // self.config.num_slots
        kept = min(-(-(self.window + WINDOW_SLACK_TOKENS) // pool.unit_tokens) + 1, share)
        states = Counter(slot.state for slot in now.slots)
        assert pool.pinned <= kept * states[SlotState.IDLE]
        still = states[SlotState.PREFILL] + states[SlotState.TRANSFER]
        assert pool.used <= kept * still + share * states[SlotState.DECODE]

    def _on_events(self, events: Sequence[tuple[str, Event]]) -> None:
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
        self.adapters.check_started(request, started, self.engine.snapshot())
        if request.slot_id is not None:
            assert started.slot_id == request.slot_id
        assert started.cached_tokens <= max(0, len(request.prompt) - 1)
        assert (started.cached_tokens == 0) == bool(started.no_reuse)
        assert request.cache_prompt or started.cached_tokens == 0
        if started.cached_tokens:
            self.seen["reused" if self.window is None else "reused:window"] += 1
            self.seen[f"reused:{started.cache_source.value}"] += 1
        self.slots.note_start(started.slot_id, is_own=started.cache_source is CacheSource.SLOT)
        if started.cache_source is CacheSource.SLOT:
            life.is_marked = started.slot_id in self._marked_slots
            self.seen["marked"] += life.is_marked
        elif request.prompt and not request.is_warming:  # after which the old state may return
            self._marked_slots.discard(started.slot_id)
        if started.cache_source is CacheSource.SLOT:
            owners = self.slots.owners_of(started.slot_id)
            assert request.tenant in owners, "another tenant's prefix"
        if self.is_recurrent and started.cached_tokens:
            self.seen[f"reused:state:{started.cache_source.value}"] += 1
        if "recurrent state" in started.no_reuse:
            self.seen["state_gone"] += 1
        if "window" in started.no_reuse:
            self.seen["window_gone"] += 1
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
                self.seen[f"finished:{end.reason.value}"] += 1
                self._judge_finished(life, end, tokens)
            case Failed(error=error):
                assert isinstance(error, EngineError), error
                self.seen[f"failed:{error.reason}"] += 1
                if error.reason == "ENGINE_FAULT":
                    # The fake runner's own complaints are assertions, and never an answer.
                    assert isinstance(error.__cause__, _INJECTED), error.__cause__
                    self.seen[f"fault:{type(error.__cause__).__name__}"] += 1
                    assert self.failpoints.fired.total() + self._num_faults > 0
            case Cancelled():
                assert life.cancelled_in is not None

    def _note_marks(self, life: Life) -> None:
        evaluated = len(life.request.prompt) + len(life.chunks) - 1
        if life.started is None or evaluated < self.context_tokens - 1:
            return
        request = life.request
        served = (s.slot_id for s in self.engine.snapshot().slots if s.request is request)
        self._marked_slots.update(served)
        self._marked_slots.add(self._homes.get(request.request_id, life.started.slot_id))

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
        activated_from = self.adapters.history(request, life.started)[1]
        if request.is_warming:
            self.seen["warmed"] += 1
            assert not tokens
            assert activated_from or end.held_tokens == len(request.prompt)
            return
        if activated_from:
            assert end.held_tokens <= min(evaluated, activated_from), "an activated tail was kept"
        elif evaluated < self.context_tokens:
            assert end.held_tokens == evaluated
        elif end.reason is not FinishReason.CONTEXT_FULL:
            self.seen["shifted"] += 1
            assert end.truncated
            assert end.held_tokens < self.context_tokens
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
        return self.solo.run(life.request, *self.adapters.history(life.request, life.started))

    def _judge_reason(self, life: Life, end: Finished, tokens: list[int]) -> None:
        if life.is_marked:
            return
        expected = self._solo(life)
        if end.reason is expected.reason and len(tokens) == len(expected.tokens):
            return
        # Alone in a pool smaller than its context, a request ends when the pool is full.
        assert end.reason is FinishReason.CONTEXT_FULL
        assert end.truncated
        page_tokens = self.config.page_tokens
        full = len(life.request.prompt) + len(tokens) - 1
        assert full % page_tokens == 0
        assert full // page_tokens in self.pools.kv_sizes
        self.seen["finished:pool_full"] += 1

    # Rest.

    def _come_to_rest(self) -> None:
        self.failpoints.disarm()
        self.runner.fail_with = self.runner.fail_transfer_with = None
        self._is_faulty = False
        for _ in range(LIVENESS_STEPS):
            self._step()
            ended = all(life.end is not None for life in self.lives.values())
            if ended and self.pools.is_at_rest and self.slots.is_at_rest(self._is_unfinished):
                break
        self._step()
        assert all(life.end is not None for life in self.lives.values()), "not at rest"
        assert all(done.done() for done in self._erasures)
        self._note_erasures()
        self.adapters.come_to_rest()
        assert self.pools.is_at_rest
        assert self.slots.is_at_rest(self._is_unfinished)
        self.seen.update(self.pools.seen)
        self.seen.update(self.adapters.seen)
        end = self.engine.snapshot()
        self._check_accounts(end)
        preempted = "preempted" if self.window is None else "preempted:window"
        self.seen[preempted] += end.counters.preemptions
        self.seen["evicted"] += end.counters.evicted_slots
        for site, times in self.failpoints.fired.items():
            self.seen[f"fired:{site.value}"] += times
        self.slots.stop()
        self.seen.update(self.slots.seen)
        self._submit(Request("late", (1,)))

    def _is_unfinished(self, request: Request) -> bool:
        return not isinstance(self.lives[request.request_id].end, Finished)

    def _note_erasures(self) -> None:
        for done in self._erasures:
            if done.cancelled():
                continue
            error = done.exception()
            if isinstance(error, EngineError):
                self.seen[f"erase:{error.reason}"] += 1
            else:
                assert error is None, error
                self.seen["erased"] += 1

    def _check_accounts(self, end: Snapshot) -> None:
        lives = self.lives.values()
        counters = end.counters
        assert counters.generated_tokens == sum(len(life.chunks) for life in lives)
        started = [life.started for life in lives if life.started is not None]
        assert counters.prompt_tokens_cached == sum(one.cached_tokens for one in started)
        # What ended early evaluated a part of its prompt, what finished all that was not cached.
        evaluated = [
            life.started.prompt_tokens - life.started.cached_tokens
            for life in lives
            if life.started is not None and (life.chunks or isinstance(life.end, Finished))
        ]
        most = sum(one.prompt_tokens - one.cached_tokens for one in started)
        assert sum(evaluated) <= counters.prompt_tokens_evaluated <= most
        assert end.running == end.queued == 0

"""A seeded random life of the real engine over fakes, judged against a model of a solo run.

`Simulation(seed)` draws everything from one generator, so a seed replays exactly. `run` drives
random commands with faults, then turns the faults off and demands that all comes to rest.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

from engine.errors import EngineError
from engine.failpoints import Failpoints, Site
from engine.memory.planner import WINDOW_SLACK_TOKENS, plan_memory
from engine.requests import AdapterScale, Request, SamplingParams
from engine.scheduling.erasing import ErasedSlot
from engine.step import PoolLost
from engine.types import CancelCause, EngineConfig, Finished, PoolKind, SlotState, Snapshot
from tests.fake_runner import EXPERTS
from tests.fakes import FakeClock, fake_engine, fake_shape, fitting_runner
from tests.unit.engine.adapter_life import AdapterLife
from tests.unit.engine.judge import Judge, Life, Scene
from tests.unit.engine.lockstep import lockstep
from tests.unit.engine.pool_life import PoolLife
from tests.unit.engine.slot_life import SlotLife, is_in_transfer
from tests.unit.engine.solo_model import STOP, TOKENIZER

LIVENESS_STEPS = 1000
_LETTERS = TOKENIZER.encode("ab", add_special=False, parse_special=False)


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
        self.seen: Counter[str] = Counter()
        self._erasures: list[Future[ErasedSlot]] = []
        self.slots = SlotLife(seed + 4)
        self.adapters = AdapterLife(seed + 2, _LETTERS)
        self.pools = PoolLife(seed + 3)
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
        self.runner.fails_at_start = self.rng.random() < 0.5
        # As the engine's own thread does, or telling all that a step did at its end.
        self.may_hold = self.rng.random() < 0.7
        self.context_tokens = self.plan.slot_context_tokens
        self.judge = Judge(self._scene(), self.adapters, self.slots, self.seen)
        self._lives = self.judge.lives
        self.engine = fake_engine(
            self.judge.on_events,
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

    def _scene(self) -> Scene:
        return Scene(
            config=self.config,
            context_tokens=self.context_tokens,
            window=self.window,
            is_recurrent=self.is_recurrent,
            kv_sizes=lambda: self.pools.kv_sizes,
            snapshot=lambda: self.engine.snapshot(),
            has_had_faults=lambda: self.failpoints.fired.total() + self._num_faults > 0,
        )

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
            request_id=f"r{len(self._lives)}-{rng.randrange(1 << 30)}",
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
        if not self._lives:
            return (TOKENIZER.bos_token,)
        life = self.rng.choice(list(self._lives.values()))
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
        running = [life.request for life in self.judge.living]
        return rng.choice([*bad, *running[:1]])

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request, save=self.slots.take_save(request))
        except EngineError as error:
            self.seen[f"refused:{error.reason}"] += 1
            self.slots.forget(request)
            return
        assert request.request_id not in self._lives or self._lives[request.request_id].end
        self._lives[request.request_id] = Life(request, order=len(self._lives))

    def _cancel(self) -> None:
        living = self.judge.living
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
        assert self.engine.step(may_hold=self.may_hold)
        self.engine.check_integrity()
        self._check_snapshot(self.engine.snapshot())
        for life in self.judge.living:
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
        living = len(self.judge.living)
        assert now.running + now.queued == living
        for slot in now.slots:
            assert slot.held_tokens <= slot.context_tokens
            if slot.request is not None:
                self.judge.homes[slot.request.request_id] = slot.slot_id
            tenant = self.slots.tenant_of(slot)
            if tenant is not None:
                self.slots.tenants[slot.slot_id] = tenant
        counters = now.counters
        ended = counters.requests_finished + counters.requests_failed + counters.requests_cancelled
        assert counters.requests_started == ended + living
        self._check_windows(now)
        running = [life.started for life in self._lives.values() if life.started and not life.end]
        self.adapters.check(now, running, self.runner)

    def _pool_kinds(self) -> list[PoolKind]:
        kinds = [PoolKind.KV]
        kinds += [PoolKind.SWA] if self.window is not None else []
        kinds += [PoolKind.MAMBA] if self.is_recurrent else []
        return kinds + ([PoolKind.MOE_CACHE] if self.runner.num_experts else [])

    def _check_windows(self, now: Snapshot) -> None:
        """A slot has no more than its window, or its share of the floor.

        When it decodes, or when the device has its chunk: what that writes is held already.
        """
        if self.window is None:
            return
        pool = now.pools[1]
        share = pool.floor // self.config.num_slots
        kept = min(-(-(self.window + WINDOW_SLACK_TOKENS) // pool.unit_tokens) + 1, share)
        states = Counter(slot.state for slot in now.slots)
        assert pool.pinned <= kept * states[SlotState.IDLE]
        prefill = share if self.may_hold else kept
        still = kept * states[SlotState.TRANSFER] + prefill * states[SlotState.PREFILL]
        assert pool.used <= still + share * states[SlotState.DECODE]

    # Rest.

    def _come_to_rest(self) -> None:
        self.failpoints.disarm()
        self.runner.fail_with = self.runner.fail_transfer_with = None
        self._is_faulty = False
        for _ in range(LIVENESS_STEPS):
            self._step()
            ended = not self.judge.living
            if ended and self.pools.is_at_rest and self.slots.is_at_rest(self.judge.is_unfinished):
                break
        self._step()
        assert not self.judge.living, "not at rest"
        assert all(done.done() for done in self._erasures)
        self._note_erasures()
        self.adapters.come_to_rest()
        assert self.pools.is_at_rest
        assert self.slots.is_at_rest(self.judge.is_unfinished)
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
        lives = self._lives.values()
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

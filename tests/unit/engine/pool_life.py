"""Rebuilds within a simulated life: drawn, and judged by what the engine says of its pools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from engine.engine import Engine
from engine.errors import EngineError
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport, RebuildWish
from engine.slots.survivors import HeldState
from engine.types import PoolKind, Snapshot
from tests.fake_runner import EXPERTS
from tests.fakes import FakeClock


class PoolLife:
    """Asks for other sizes and follows what becomes of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.kv_sizes: set[int] = set()
        self._side: list[Callable[[], None]] = []
        self._asked: list[tuple[RebuildWish, Future[RebuildReport]]] = []
        self._sizes: dict[PoolKind, int] = {}

    def start(self, work: Callable[[], None]) -> None:
        """Keeps what another thread would do, until `work`."""
        self._side.append(work)

    def work(self) -> None:
        """Other threads get on, or not."""
        if self._side and self.rng.random() < 0.5:
            self._side.pop(0)()

    def command(self, engine: Engine, clock: FakeClock, *, is_faulty: bool) -> None:
        """Asks for a rebuild, or gives one up."""
        rng = self.rng
        running = [done for _, done in self._asked if not done.done()]
        if running and rng.random() < 0.2:
            rng.choice(running).cancel()
            return
        pools = engine.snapshot().pools
        pool = rng.choice(pools)
        most = max(2 * pool.floor, 24)
        if pool.kind is PoolKind.MOE_CACHE:
            most = rng.choice([EXPERTS.ceiling, EXPERTS.ceiling, EXPERTS.ceiling + 1])
        size = rng.choice([pool.floor, pool.floor - 1, rng.randint(pool.floor, most), most])
        sizes = {pool.kind.value: rng.choice([size, size, size, 1 << 45])}
        if rng.random() < 0.1:
            sizes["mamba"] = 40
        wish = RebuildWish(
            PoolSizes(**sizes),
            request_id=f"rebuild-{rng.randrange(4)}",
            drain_s=rng.choice([0.0, 1.0, 100.0]),
            validate_only=rng.random() < 0.2,
        )
        self._asked.append((wish, engine.rebuild(wish)))

    def check(self, now: Snapshot) -> None:
        """Sizes change by rebuilds that went well, and by nothing else."""
        sizes = {pool.kind: pool.size for pool in now.pools}
        self.kv_sizes.add(sizes[PoolKind.KV])
        expected = self._sizes or sizes
        still: list[tuple[RebuildWish, Future[RebuildReport]]] = []
        for wish, done in self._asked:
            if not done.done():
                still.append((wish, done))
                continue
            report = self._outcome(done)
            if report is not None and report.stages:
                expected = dict(report.current.items())
        self._asked = still
        assert sizes == expected
        self._sizes = sizes

    def _outcome(self, done: Future[RebuildReport]) -> RebuildReport | None:
        if done.cancelled():
            self.seen["rebuild:cancelled"] += 1
            return None
        error = done.exception()
        if error is not None:
            assert isinstance(error, EngineError), error
            assert not isinstance(error.__cause__, AssertionError), error.__cause__
            self.seen[f"rebuild:{error.reason}"] += 1
            return None
        report = done.result()
        self.seen["rebuilt" if report.stages else "rebuild:forecast"] += 1
        self.seen["rebuild:dropped"] += report.dropped.prefix_tokens > 0
        but_experts = [
            [(kind, size) for kind, size in sizes.items() if kind is not PoolKind.MOE_CACHE]
            for sizes in (report.previous, report.current)
        ]
        if but_experts[0] == but_experts[1]:
            self.seen["rebuilt:moe_cache"] += bool(report.stages)
            dropped = replace(report.dropped, experts=0)
            assert dropped == HeldState(), "experts cost a request its state"
        return report

    @property
    def is_at_rest(self) -> bool:
        """Whether every rebuild has an outcome."""
        return not self._side and not self._asked

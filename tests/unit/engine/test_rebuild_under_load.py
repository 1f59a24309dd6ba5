"""Eight streams while pools are given other sizes again and again, half of the wishes refused."""

from __future__ import annotations

import random

import pytest

from engine.errors import EngineError
from engine.failpoints import Failpoints, Site
from engine.memory.errors import RebuildRolledBack
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildWish
from engine.types import PoolInfo, PoolKind
from tests.fake_runner import EXPERTS
from tests.unit.engine.drive import Drive, ask, solo

NUM_STREAMS, NUM_REBUILDS = 8, 50
KINDS = {
    "full": {},
    "window": {"window": 8},
    "recurrent": {"mamba_slots": 24},
    "experts": {"num_experts": EXPERTS.ceiling},
}
SITES = [site for site in Site if site.value.startswith("rebuild")]


class Load:
    """Streams that begin anew as they end, each judged by its solo run."""

    def __init__(self, drive: Drive, rng: random.Random) -> None:
        self.drive, self.rng = drive, rng
        self.prompts: dict[str, tuple[tuple[int, ...], int]] = {}
        self.running: list[str] = []

    def keep_up(self) -> None:
        self.running = [name for name in self.running if not self.drive.end(name)]
        while len(self.running) < NUM_STREAMS:
            name = f"s{len(self.prompts)}"
            # Heads in common, so that prefixes are reused across rebuilds.
            prompt = (*range(10, 10 + self.rng.choice([4, 12, 20])), self.rng.randint(40, 60))
            self.prompts[name] = prompt, self.rng.randint(3, 20)
            self.running.append(name)
            self.drive.engine.submit(ask(name, *self.prompts[name]))

    def check(self) -> None:
        window = self.drive.runner.window
        for name, (prompt, count) in self.prompts.items():
            assert self.drive.tokens(name) == solo(prompt, count, window), name


def accepted(rng: random.Random, pool: PoolInfo) -> PoolSizes:
    """A size that is not the present one; pages for every stream, so that all go on."""
    least, most = pool.floor, pool.floor + 40
    if pool.kind is PoolKind.KV:
        least, most = 100, 160
    if pool.kind is PoolKind.MOE_CACHE:
        most = EXPERTS.ceiling
    sizes = [size for size in range(least, most + 1) if size != pool.size]
    return PoolSizes(**{pool.kind.value: rng.choice(sizes)})


def refused(rng: random.Random, pool: PoolInfo) -> PoolSizes:
    return PoolSizes(**{pool.kind.value: rng.choice([pool.floor - 1, 1 << 50])})


@pytest.mark.parametrize("kind", KINDS)
def test_every_stream_says_what_it_says_alone(kind: str) -> None:
    rng, failpoints = random.Random(kind), Failpoints()
    drive = Drive(num_slots=NUM_STREAMS, kv_pages=120, failpoints=failpoints, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    load = Load(drive, rng)
    outcomes = {"rebuilt": 0, "refused": 0, "undone": 0}
    for number in range(NUM_REBUILDS):
        load.keep_up()
        drive.steps(rng.randint(1, 5))
        before = {pool.kind: pool.size for pool in drive.engine.snapshot().pools}
        pool = rng.choice(drive.engine.snapshot().pools)
        is_refused, is_faulty = number % 2 == 0, number % 3 == 0
        target = refused(rng, pool) if is_refused else accepted(rng, pool)
        if is_faulty:
            failpoints.armed[rng.choice(SITES)] = 1.0
        done = drive.engine.rebuild(RebuildWish(target, f"r{number}", drain_s=1e6))
        for _ in range(1000):
            load.keep_up()
            drive.steps().on_the_side()
            if done.done():
                break
        failpoints.disarm()
        now = {pool.kind: pool.size for pool in drive.engine.snapshot().pools}
        error = done.exception(0)
        if error is None:
            outcomes["rebuilt"] += 1
            assert now == dict(done.result().current.items())
            continue
        assert isinstance(error, EngineError), error
        assert now == before
        outcomes["undone" if isinstance(error, RebuildRolledBack) else "refused"] += 1
        assert isinstance(error, RebuildRolledBack) == (is_faulty and not is_refused)
    drive.rest()
    load.check()
    assert outcomes == {"rebuilt": 17, "refused": 25, "undone": 8}
    assert len(load.prompts) > 2 * NUM_STREAMS

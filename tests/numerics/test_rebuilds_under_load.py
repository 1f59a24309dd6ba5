"""A real model under eight streams while its pools are given other sizes: not one token differs.

`REBUILDS` sets how many (a nightly run takes 100); with 50 or more the process's memory must be back
at its level, too.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.failpoints import Failpoints, Site
from engine.loading import Loaded, load_engine
from engine.memory.errors import BelowFloor, RebuildRolledBack, TooLarge
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport, RebuildWish
from engine.requests import Request, SamplingParams
from engine.types import Cancelled, Chunk, EngineConfig, Event, Failed, Finished
from tests.families import FAMILIES, write_family
from tests.native import requires_native
from tests.pool_memory import status_bytes

NUM_REBUILDS = int(os.environ.get("REBUILDS", "5"))
NUM_STREAMS = 8
GREEDY = SamplingParams(temperature=0.0)
SITES = [site for site in Site if site.value.startswith("rebuild")]

pytestmark = [requires_native, pytest.mark.timeout(300 + 30 * NUM_REBUILDS)]


class Streams:
    """Requests of one engine: what each was told, as it comes."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[str, Event]] = queue.Queue()
        self.tokens: dict[str, list[int]] = {}
        self.num_asked = 0

    def sink(self, events: Sequence[tuple[str, Event]]) -> None:
        for each in events:
            self.events.put(each)

    def ask(self, loaded: Loaded, prompt: tuple[int, ...], count: int) -> str:
        name = f"s{self.num_asked}"
        self.num_asked += 1
        self.tokens[name] = []
        loaded.engine.submit(
            Request(name, prompt, sampling=GREEDY, max_tokens=count, ignore_eos=True)
        )
        return name

    def next_end(self) -> str:
        """Waits until a request has ended well."""
        while True:
            name, event = self.events.get(timeout=240)
            assert not isinstance(event, Failed | Cancelled), event
            if isinstance(event, Chunk):
                self.tokens[name].append(event.token_id)
            if isinstance(event, Finished):
                return name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(
        tmp_path_factory.mktemp("m") / "m.gguf", FAMILIES["gpt-oss"], has_tokenizer=True
    )


def config(cache: Path) -> EngineConfig:
    return EngineConfig(
        512,
        num_slots=NUM_STREAMS,
        chunk_tokens=32,
        page_tokens=16,
        kernels="native",
        compile_cache=str(cache),
    )


def targets(loaded: Loaded) -> list[PoolSizes]:
    """Few sizes, so that their programs are compiled once."""
    shape, sizes = loaded.engine.pools.split()
    experts = next(pool for pool in shape.pools if pool.kind.value == "moe_cache")
    assert sizes.kv is not None
    assert sizes.swa is not None
    assert experts.most is not None
    return [
        PoolSizes(kv=sizes.kv + 40),
        PoolSizes(moe_cache=experts.floor),
        PoolSizes(swa=sizes.swa + 9),
        PoolSizes(kv=sizes.kv, moe_cache=experts.floor + 5),
        PoolSizes(moe_cache=experts.most, swa=sizes.swa),
    ]


@pytest.fixture
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that pytest keeps holds, by its traceback, all programs of the pools that were."""
    monkeypatch.setattr(logging.getLogger("engine.rebuild"), "disabled", True)


@pytest.mark.usefixtures("no_records")
def test_every_stream_says_what_it_says_alone(model: Path, tmp_path: Path) -> None:
    rng, failpoints = random.Random(0), Failpoints()
    streams = Streams()
    loaded = load_engine(model, config(tmp_path), streams.sink, failpoints=failpoints)
    engine = loaded.engine
    engine.start()
    prompts = [
        (tuple(rng.randrange(3, 259) for _ in range(rng.choice([5, 40, 90]))), rng.randint(20, 60))
        for _ in range(12)
    ]
    expected: list[list[int]] = []
    for prompt, count in prompts:
        name = streams.ask(loaded, prompt, count)
        assert streams.next_end() == name
        expected.append(streams.tokens.pop(name))
    running: dict[str, int] = {}

    def keep_up() -> None:
        while len(running) < NUM_STREAMS:
            index = rng.randrange(len(prompts))
            running[streams.ask(loaded, *prompts[index])] = index

    def one_ends() -> None:
        name = streams.next_end()
        assert streams.tokens.pop(name) == expected[running.pop(name)]

    cycle, level = targets(loaded), 0
    seen = {"rebuilt": 0, "refused": 0, "undone": 0}
    for number in range(NUM_REBUILDS):
        keep_up()
        is_refused, is_faulty = number % 2 == 1, number % 3 == 2
        target = PoolSizes(kv=rng.choice([1, 1 << 50])) if is_refused else cycle[number // 2 % 5]
        failpoints.armed = {rng.choice(SITES): 1.0} if is_faulty else {}
        done = engine.rebuild(RebuildWish(target, f"r{number}", drain_s=120.0))
        while not done.done():
            one_ends()
            keep_up()
        seen[outcome(done.exception(0))] += 1
        if number == 20:
            level = status_bytes("RssAnon") if sys.platform == "linux" else 0
    while running:
        one_ends()
    engine.stop()
    engine.check_integrity()
    pools = engine.snapshot().pools
    assert all(pool.used == 0 for pool in pools)
    assert all(pool.free + pool.pinned + pool.cached == pool.size for pool in pools)
    assert min(seen.values()) > 0, seen
    if level and NUM_REBUILDS >= 50:
        gc.collect()
        grown = status_bytes("RssAnon") - level
        print(f"{seen}, memory {level >> 10} KiB after 20, {grown >> 10:+} KiB after all")
        assert grown <= 8 << 20


def outcome(error: BaseException | None) -> str:
    if error is None:
        return "rebuilt"
    if isinstance(error, RebuildRolledBack):
        return "undone"
    assert isinstance(error, BelowFloor | TooLarge), error
    return "refused"


def test_every_pool_serves_at_its_floor(model: Path, tmp_path: Path) -> None:
    streams = Streams()
    loaded = load_engine(model, config(tmp_path), streams.sink)
    engine = loaded.engine
    engine.start()
    prompt = (5, 6, 7, 8)

    def answer() -> list[int]:
        name = streams.ask(loaded, prompt, 6)
        assert streams.next_end() == name
        return streams.tokens.pop(name)

    def rebuild(sizes: PoolSizes) -> RebuildReport:
        return engine.rebuild(RebuildWish(sizes, "r")).result(240)

    expected = answer()
    for pool in engine.snapshot().pools:
        kind = pool.kind.value
        if pool.size > pool.floor:
            assert rebuild(PoolSizes(**{kind: pool.floor})).current.get(pool.kind) == pool.floor
        assert answer() == expected, kind
        with pytest.raises(BelowFloor) as refused:
            rebuild(PoolSizes(**{kind: pool.floor - 1}))
        assert refused.value.violations == ((kind, pool.floor - 1, pool.floor),)
    engine.stop()

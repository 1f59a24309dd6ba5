"""Lives of adapters on a real engine: every reply is the solo run of its set, nothing compiles."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any, cast

import jax
import pytest

from engine.adapters.content import AdapterContent
from engine.gguf.reader import GgufFile
from engine.loading import Loaded, load_engine
from engine.model.adapter_banks import adapted_shapes
from engine.model.architectures import read_spec
from engine.types import EngineConfig
from tests.adapter_runs.replies import Replies
from tests.adapter_runs.storm import Storm
from tests.adapter_runs.walk import Walk
from tests.adapters import TinyAdapter, write_adapter
from tests.ggufs import TinyLlama, write_llama

CONFIG = EngineConfig(
    context_tokens=256,
    num_slots=4,
    page_tokens=16,
    chunk_tokens=32,
    max_adapters=3,
    max_adapter_rank=8,
)
PROMPTS = [tuple(range(5, 5 + length)) for length in (1, 17, 50)] + [(30,) * 33]


@pytest.fixture(scope="module", name="parts")
def make_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("runs")
    path = write_llama(folder / "tiny.gguf", TinyLlama(num_layers=2))
    with GgufFile.open(path) as file:
        shapes = adapted_shapes(read_spec(file))
    adapters = [
        write_adapter(folder / f"{seed}.gguf", TinyAdapter(seed=seed), shapes, tuple(shapes))
        for seed in range(5)
    ]
    return path, adapters


def open_engine(parts: tuple[Path, list[Path]]) -> tuple[Loaded, Replies, list[AdapterContent]]:
    replies = Replies()
    loaded = load_engine(parts[0], CONFIG, replies.take)
    return loaded, replies, [loaded.engine.adapters.read(path) for path in parts[1]]


def live_bytes() -> int:
    gc.collect()
    arrays = cast("list[jax.Array]", jax.live_arrays())
    return sum(int(array.nbytes) for array in arrays)


@pytest.mark.parametrize("num_commands", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_commands_leak_nothing_and_compile_nothing(
    parts: tuple[Path, list[Path]], num_commands: int
) -> None:
    loaded, replies, contents = open_engine(parts)
    compiles, before = loaded.runner.compiles, live_bytes()
    walk = Walk(loaded.engine, replies, contents, PROMPTS, seed=1)
    walk.run(num_commands)
    walk.judge()
    assert walk.seen["adapted"] > 20
    assert loaded.runner.compiles == compiles
    # Errors that it keeps hold the frames that they came through, and so a step's results.
    replies.all.clear()
    del walk
    assert live_bytes() <= before


def test_threads_that_change_adapters_under_streams(parts: tuple[Path, list[Path]]) -> None:
    loaded, replies, contents = open_engine(parts)
    compiles = loaded.runner.compiles
    loaded.engine.start()
    try:
        storm = Storm(loaded.engine, replies, contents, PROMPTS)
        storm.run(lambda num_asked: num_asked < 6)
    finally:
        loaded.engine.stop()
    assert loaded.engine.fault is None
    assert loaded.runner.compiles == compiles
    assert storm.seen["load"] > 0
    assert storm.seen["scale"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_storm_of_minutes(parts: tuple[Path, list[Path]], pytestconfig: pytest.Config) -> None:
    minutes: Any = pytestconfig.getoption("storm_minutes")
    loaded, replies, contents = open_engine(parts)
    compiles, before = loaded.runner.compiles, live_bytes()
    loaded.engine.start()
    end_s = time.monotonic() + 60 * minutes
    try:
        storm = Storm(loaded.engine, replies, contents, PROMPTS)
        storm.run(lambda _: time.monotonic() < end_s)
    finally:
        loaded.engine.stop()
    print(dict(storm.seen))
    assert loaded.engine.fault is None
    assert loaded.runner.compiles == compiles
    assert storm.seen["adapted"] > 0
    for outcome in ("load", "load:ADAPTER_EXISTS", "scale", "unload", "unload:ADAPTER_IN_USE"):
        assert storm.seen[outcome], outcome
    replies.all.clear()
    del storm
    assert live_bytes() <= before

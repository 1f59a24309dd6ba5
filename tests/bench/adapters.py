"""`python -m tests.bench.adapters MODEL [--llama-server PROGRAM]`: what LoRA adapters cost.

Eight streams with eight different adapter sets (rank 16, every projection, half precision) against
eight streams without, on our engine alone, through our server, and through llama-server, which
does not batch requests of different sets. Sides take turns; figures are medians. Then the longest
gap between two tokens of eight streams while adapters are read and loaded beside them, over the
time of one prefill chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from engine.adapters.loaded import NewAdapter
from engine.engine import Engine
from engine.gguf.reader import GgufFile
from engine.loading import Loaded, load_engine
from engine.model.adapter_banks import target_model
from engine.model.architectures import read_spec
from engine.requests import AdapterScale, Request
from engine.step import SequenceWork, StepBatch
from engine.types import (
    CancelCause,
    Cancelled,
    Chunk,
    EngineConfig,
    Event,
    Failed,
    Finished,
    StartAdapter,
)
from tests.adapters import TinyAdapter, write_adapter
from tests.bench.servers import OwnServer, PeerServer, Server

STREAMS, RANK, TOKENS, STEPS = 8, 16, 48, 24
_CONTEXT_TOKENS = 4096


def write_adapters(model: Path, folder: Path) -> list[Path]:
    """Eight adapters of every projection of a model."""
    with GgufFile.open(model) as file:
        target = target_model(read_spec(file))
    names = [name for name in target.matrices if name.startswith("blk.")]
    made = [
        TinyAdapter(
            rank=RANK,
            seed=seed,
            strength=0.01,
            ggml_type=Type.F16,
            architecture=target.architecture,
        )
        for seed in range(STREAMS)
    ]
    return [
        write_adapter(folder / f"{number}.gguf", adapter, target.matrices, names)
        for number, adapter in enumerate(made)
    ]


def engine_figures(model: Path, adapters: Sequence[Path], threads: int, rounds: int) -> None:
    """Decode steps of eight rows, and what loading does to eight streams."""
    streams = Streams()
    config = EngineConfig(
        context_tokens=_CONTEXT_TOKENS,
        num_slots=STREAMS,
        threads=threads,
        adapters=tuple(StartAdapter(str(path)) for path in adapters),
        max_adapters=STREAMS + 1,
        max_adapter_rank=RANK,
    )
    loaded = load_engine(model, config, streams.take)
    runner, page = loaded.runner, loaded.plan.page_tokens

    def work(row: int, at: int, *, adapted: bool) -> SequenceWork:
        pages = range(1 + 4 * row, 5 + 4 * row)
        assert len(pages) * page > STEPS
        chosen = ((row, 1.0),) if adapted else ()
        return SequenceWork((100 + (31 * at + row) % 1000,), at, pages, True, (), chosen)

    def rate(*, adapted: bool) -> float:
        began_s = time.perf_counter()
        for at in range(STEPS):
            rows = tuple(work(row, at, adapted=adapted) for row in range(STREAMS))
            runner.run(StepBatch(rows, None))
        return STREAMS * STEPS / (time.perf_counter() - began_s)

    both = [(rate(adapted=False), rate(adapted=True)) for _ in range(rounds + 1)][1:]
    plain, adapted = (statistics.median(side) for side in zip(*both, strict=True))
    print(f"engine, 8 rows: {plain:.0f} tokens/s without, {adapted:.0f} with 8 sets")
    print(f"engine, with over without: {statistics.median(b / a for a, b in both):.2f} (0.8)")
    chunk_ms = statistics.median(_chunk_ms(loaded) for _ in range(rounds + 1))
    loaded.engine.start()
    try:
        stall_figures(loaded.engine, streams, adapters[0], chunk_ms, rounds)
    finally:
        loaded.engine.stop()


def _chunk_ms(loaded: Loaded) -> float:
    """One prefill chunk alone."""
    size, page = loaded.runner.max_chunk, loaded.plan.page_tokens
    tokens = tuple(100 + 31 * at % 1000 for at in range(size))
    chunk = SequenceWork(tokens, 0, range(1, 1 + -(-size // page)), True)
    began_s = time.perf_counter()
    loaded.runner.run(StepBatch((), chunk))
    return 1e3 * (time.perf_counter() - began_s)


class Streams:
    """When the tokens of each stream came."""

    def __init__(self) -> None:
        self.times_s: dict[str, list[float]] = {}
        self.running = threading.Event()
        self.ended: set[str] = set()

    def take(self, events: Sequence[tuple[str, Event]]) -> None:
        """The engine's sink."""
        now_s = time.perf_counter()
        for name, event in events:
            if isinstance(event, Chunk):
                self.times_s.setdefault(name, []).append(now_s)
            elif isinstance(event, Finished | Failed | Cancelled):
                self.ended.add(name)
        if len(self.times_s) == STREAMS and all(len(own) > 8 for own in self.times_s.values()):
            self.running.set()

    def longest_gap_ms(self, since_s: float, until_s: float) -> float:
        """The longest time between two tokens of one stream, of which one lies in the span."""
        assert not self.ended, "a stream ended in the measurement"
        return 1e3 * max(
            after - before
            for own in self.times_s.values()
            for before, after in pairwise(list(own))
            if after >= since_s and before <= until_s
        )


def stall_figures(
    engine: Engine, streams: Streams, path: Path, chunk_ms: float, rounds: int
) -> None:
    """The longest gap of eight streams with and without loads beside them."""
    for row in range(STREAMS):
        scales = (AdapterScale(row, 1.0),)
        prompt = tuple(100 + row + at for at in range(8))
        most = _CONTEXT_TOKENS // STREAMS - len(prompt)
        request = Request(f"r{row}", prompt, max_tokens=most, ignore_eos=True, adapters=scales)
        engine.submit(request)
    streams.running.wait()
    quiet_ms: list[float] = []
    busy_ms: list[float] = []
    size, load_ms = 0, 0.0
    for number in range(rounds):
        began_s = time.perf_counter()
        time.sleep(0.5)
        quiet_ms.append(streams.longest_gap_ms(began_s, time.perf_counter()))
        began_s = time.perf_counter()
        content = engine.adapters.read(path)
        new = NewAdapter(f"n{number}", str(path), 0.0, content)
        adapter = engine.adapters.load(new).result()
        ended_s = time.perf_counter()
        time.sleep(0.2)  # until the tokens after it are there
        busy_ms.append(streams.longest_gap_ms(began_s, ended_s))
        size, load_ms = content.facts.nbytes, 1e3 * (ended_s - began_s)
        engine.adapters.unload(adapter.adapter_id).result()
    for row in range(STREAMS):
        engine.cancel(f"r{row}", CancelCause.CLIENT)
    print(f"reading and loading {size / 1e6:.1f} MB beside 8 streams: {load_ms:.0f} ms")
    print(
        f"longest gap of a stream: {max(quiet_ms):.0f} ms without, {max(busy_ms):.0f} with; a "
        f"prefill chunk: {chunk_ms:.0f} ms; gap over chunk: {max(busy_ms) / chunk_ms:.2f} (1)"
    )


async def _request(port: int, adapter: int | None) -> None:
    body: dict[str, Any] = {
        "prompt": [100 + i for i in range(8)],
        "n_predict": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "lora": [{"id": 0 if adapter is None else adapter, "scale": 0 if adapter is None else 1}],
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer[:32]:
        raise RuntimeError(answer[:500].decode(errors="replace"))


def served_rate(server: Server, *, adapted: bool) -> float:
    """Tokens per second of eight whole requests at once."""

    async def all_of_them() -> None:
        await asyncio.gather(
            *(_request(server.port, i if adapted else None) for i in range(STREAMS))
        )

    began_s = time.perf_counter()
    asyncio.run(all_of_them())
    return STREAMS * TOKENS / (time.perf_counter() - began_s)


def served_figures(sides: dict[str, Server], rounds: int) -> None:
    """Rates of every server, with and without."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, server in sides.items():
            pair = served_rate(server, adapted=False), served_rate(server, adapted=True)
            rates[name].append(pair)
    medians: dict[str, float] = {}
    for name, pairs in rates.items():
        plain, adapted = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
        medians[name] = adapted
        print(f"{name}, 8 requests: {plain:.0f} tokens/s without, {adapted:.0f} with 8 sets")
    if len(medians) > 1:
        ours, peer = medians.values()
        print(f"served with 8 sets, ours over the peer's: {ours / peer:.1f} (4)")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="adapters", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(arguments.model, Path(folder))
        engine_figures(arguments.model, adapters, arguments.threads, arguments.rounds)
        flags = [word for path in adapters for word in ("--lora", str(path))]
        with OwnServer(
            arguments.model,
            threads=arguments.threads,
            kernels="auto",
            compile_cache=str(Path(folder) / "xla"),
            context_tokens=_CONTEXT_TOKENS,
            more=flags,
        ) as ours:
            sides: dict[str, Server] = {"ours": ours}
            if arguments.llama_server is None:
                served_figures(sides, arguments.rounds)
                return
            with PeerServer(
                arguments.llama_server,
                arguments.model,
                threads=arguments.threads,
                context_tokens=_CONTEXT_TOKENS,
                more=flags,
            ) as peer:
                served_figures({**sides, "peer": peer}, arguments.rounds)


if __name__ == "__main__":
    main()

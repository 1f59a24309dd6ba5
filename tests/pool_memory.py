"""`python -m tests.pool_memory MODEL CACHE`: real memory of a process whose pools change.

A process of its own, because what a test runner holds already says nothing. It prints one JSON line
per size of its pools: what they take by the books, and what the process takes.
"""

from __future__ import annotations

import gc
import json
import queue
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.loading import load_engine
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildWish
from engine.requests import Request, SamplingParams
from engine.types import EngineConfig, Event, Failed, Finished

KV_BYTES = 512 << 20
PROMPT = tuple(range(3, 250))


def status_bytes(name: str) -> int:
    """A size of this process, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


class Process:
    """An engine, and what it takes."""

    def __init__(self, model: str, cache: str) -> None:
        self._ends: queue.Queue[Event] = queue.Queue()
        config = EngineConfig(
            context_tokens=512, num_slots=2, chunk_tokens=64, kernels="native", compile_cache=cache
        )
        self.loaded = load_engine(model, config, self._sink)
        self.engine = self.loaded.engine
        self.engine.start()

    def _sink(self, events: Sequence[tuple[str, Event]]) -> None:
        for _, event in events:
            if isinstance(event, Finished | Failed):
                self._ends.put(event)

    def answer(self) -> list[int]:
        """Serves a prompt in both slots, so that pages are written and read."""
        cached: list[int] = []
        for slot in range(2):
            sampling = SamplingParams(temperature=0.0)
            request = Request(f"r{slot}", PROMPT, sampling=sampling, max_tokens=4, slot_id=slot)
            self.engine.submit(request)
            end = self._ends.get(timeout=120)
            assert isinstance(end, Finished), end
            cached.append(end.cached_tokens)
        return cached

    def resize(self, **sizes: int) -> None:
        """Gives pools other sizes and tells of it."""
        self.engine.rebuild(RebuildWish(PoolSizes(**sizes), json.dumps(sizes))).result(300)
        self.tell(json.dumps(sizes))

    def tell(self, label: str) -> None:
        """Prints a line."""
        cached = self.answer()
        gc.collect()
        shape, sizes = self.engine.pools.split()
        held = shape.fixed_bytes(sizes) + shape.needed_bytes(sizes)
        row = {
            "label": label,
            "cached": cached,
            "books": held,
            "anonymous": status_bytes("RssAnon"),
            "highest": status_bytes("VmHWM"),
        }
        print(json.dumps(row), flush=True)


def main(model: str, cache: str) -> None:
    """Goes through the sizes twice: the second time nothing may come on top."""
    process = Process(model, cache)
    shape, sizes = process.engine.pools.split()
    pools = {pool.kind.value: pool for pool in shape.pools}
    few = sizes.kv or 0
    many = KV_BYTES // pools["kv"].unit_bytes
    floor, ceiling = pools["moe_cache"].floor, pools["moe_cache"].most or 0
    process.tell("start")
    for _ in range(2):
        process.resize(kv=many)
        process.resize(moe_cache=floor)
        process.resize(kv=many // 2)
        process.resize(moe_cache=ceiling)
        process.resize(kv=few)
    process.engine.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

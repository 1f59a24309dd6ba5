"""One soak of a running server: the load, a sample now and then, and the verdict."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.conftest import healthy, http_client
from tests.e2e.programs import Program
from tests.e2e.rpc import client
from tests.soak.counters import fallen, read_counters, read_metrics
from tests.soak.judge import Sample, faults, table
from tests.soak.load import Load, steadily
from tests.soak.processes import descendants, usage

NUM_WORKERS = 6
# Of 45 minutes one each 5 minutes.
NUM_REBUILDS = 9
_HOST_CACHE = "kvarts_host_cache_bytes"


@dataclass(frozen=True)
class Soak:
    """What a soak saw."""

    samples: list[Sample]
    counts: dict[str, int]
    refused: list[str]
    """Answers that no client should get."""

    def report(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{table(self.samples)}\nanswers: {counts}"

    def faults(self) -> list[str]:
        """Returns a sentence for each thing that is wrong."""
        return [*faults(self.samples), *self.refused]


async def soak(
    program: Program,
    num_slots: int,
    seconds: float,
    sample_s: float,
    tell: Callable[[str], object] = print,
) -> Soak:
    """Loads a ready server for so long; afterwards it must be idle and hold nothing."""
    url = await asyncio.to_thread(program.ready().http_url)
    await healthy(url)
    samples: list[Sample] = []
    async with http_client(url) as http, client(program.grpc_address()) as rpc:
        load = Load(http, num_slots)
        start = time.monotonic()
        before_rebuild: int | None = None
        rebuilding = 0
        counted: dict[str, float] = {}

        async def compiles() -> int:
            return (await rpc.info()).counters.compiles

        async def rebuild() -> None:
            # Pools of another size want programs of their own; nothing else may.
            nonlocal before_rebuild, rebuilding
            before_rebuild = await compiles()
            await load.rebuild()
            rebuilding += await compiles() - before_rebuild
            before_rebuild = None

        async def sample() -> None:
            nonlocal counted
            service = program.process.pid
            spent, load.latencies_ms = load.latencies_ms, []
            text = (await http.get("/metrics")).text
            # In the middle of a rebuild nobody can tell its programs from others.
            seen = await compiles() if before_rebuild is None else before_rebuild
            samples.append(
                Sample(
                    at=time.monotonic() - start,
                    service=usage([service]),
                    gateway=usage(descendants(service)),
                    compiles=seen - rebuilding,
                    host_cache=int(read_metrics(text)[_HOST_CACHE]),
                    done=load.done,
                    latency_ms=statistics.median(spent) if spent else math.nan,
                )
            )
            before, counted = counted, read_counters(text)
            load.faults += fallen(before, counted)
            tell(repr(samples[-1]))

        end = start + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_WORKERS):
                group.create_task(load.work(end))
            group.create_task(steadily(rebuild, seconds / NUM_REBUILDS, end))
            group.create_task(steadily(sample, sample_s, end))
        await rpc.idle()
    return Soak(samples, dict(load.counts), load.faults)

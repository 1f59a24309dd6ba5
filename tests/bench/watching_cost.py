"""What metrics and traces cost eight streams: both on, the metrics scraped each second, against neither.

Three services of the same model take turns, the first of each round in turn: one watched, two that are
not, whose difference is what this machine cannot tell apart. Spans go to a collector in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from kvarts.v1 import generation_pb2, generation_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.e2e.programs import Program, running

_STREAMS = 8
_NAMES = ("neither", "again", "both")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the spans that arrive."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        del context
        self.num_spans += sum(
            len(scope.spans)
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass(frozen=True)
class Cost:
    """What one service took for the tokens of a turn."""

    tokens_per_s: float
    processor_ms_per_token: float


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _turn(program: Program, channel: grpc.aio.Channel, tokens: int) -> Cost:
    """Eight streams of `tokens` each, prompts included."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

    async def stream(number: int) -> int:
        request = generation_pb2.GenerateRequest(
            text=f"Story number {number}: Once upon a time",
            max_tokens=tokens,
            ignore_eos=True,
            cache_prompt=False,
        )
        return sum([reply.HasField("chunk") async for reply in stub.Generate(request)])

    pid = program.process.pid
    begun_s, taken_s = time.perf_counter(), _processor_s(pid)
    count = sum(await asyncio.gather(*(stream(number) for number in range(_STREAMS))))
    return Cost(
        count / (time.perf_counter() - begun_s), (_processor_s(pid) - taken_s) * 1000 / count
    )


async def _scrape(url: str, is_on: asyncio.Event) -> None:
    async with httpx.AsyncClient() as http:
        while True:
            await is_on.wait()
            (await http.get(f"{url}/metrics")).raise_for_status()
            await asyncio.sleep(1)


async def _measure(programs: Sequence[Program], rounds: int, tokens: int) -> list[list[Cost]]:
    """The costs of each service, round by round; the last of `programs` is the watched one."""
    is_on = asyncio.Event()
    scraping = asyncio.create_task(_scrape(programs[-1].metrics_url(), is_on))
    found: list[list[Cost]] = [[] for _ in programs]
    async with AsyncExitStack() as channels:
        opened = [
            await channels.enter_async_context(grpc.aio.insecure_channel(program.grpc_address()))
            for program in programs
        ]
        for number in range(-1, rounds):
            for place in range(len(programs)):
                which = (place + number) % len(programs)
                is_on.set() if which == len(programs) - 1 else is_on.clear()
                cost = await _turn(programs[which], opened[which], tokens)
                if number >= 0:
                    found[which].append(cost)
            if number >= 0:
                print(*(f"{costs[-1].tokens_per_s:9.1f}" for costs in found), flush=True)
    scraping.cancel()
    return found


def _report(found: Sequence[Sequence[Cost]]) -> None:
    neither = found[0]
    for name, costs in zip(_NAMES, found, strict=True):
        pairs = list(zip(costs, neither, strict=True))
        rates = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
        times = [one.processor_ms_per_token / other.processor_ms_per_token for one, other in pairs]
        print(
            f"{name:8} {statistics.median(one.tokens_per_s for one in costs):7.1f} tokens/s, of neither's "
            f"{statistics.median(rates):.4f} (mean {statistics.mean(rates):.4f}); "
            f"{statistics.median(one.processor_ms_per_token for one in costs):.3f} ms of processor a "
            f"token, of neither's {statistics.median(times):.4f} (mean {statistics.mean(times):.4f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.watching_cost", description=__doc__
    )
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default: 20)")
    parser.add_argument("--tokens", type=int, default=240, help="of each stream (default: 240)")
    wished = parser.parse_args()

    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    flags = ("-m", wished.model, "-c", "8192", "-np", "8", "--cache-ram", "0", "--grpc-port", "0")
    watching = ("--metrics-port", "0", "--otlp-endpoint", f"http://127.0.0.1:{port}")
    print(*(f"{name:>9}" for name in _NAMES), "tokens/s")
    with ExitStack() as servers:
        programs = [
            servers.enter_context(running("kvarts-service", *flags, *more)).ready()
            for more in ((), (), watching)
        ]
        found = asyncio.run(_measure(programs, wished.rounds, wished.tokens))
    server.stop(None)
    _report(found)
    print(f"{collector.num_spans} spans")


if __name__ == "__main__":
    main()

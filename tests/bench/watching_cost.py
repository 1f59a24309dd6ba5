"""What metrics and traces cost eight streams: both on, the metrics scraped each second, against neither.

    python -m tests.bench.watching_cost MODEL.gguf [ROUNDS]

Two services of the same model take turns, the first of each round in turn; spans go to a collector
in this process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
from kvarts.v1 import generation_pb2, generation_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.e2e.programs import running

_STREAMS, _TOKENS = 8, 160


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


async def _rate(channel: grpc.aio.Channel) -> float:
    """Tokens per second of eight streams, prompts included."""
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

    async def stream(number: int) -> int:
        request = generation_pb2.GenerateRequest(
            text=f"Story number {number}: Once upon a time",
            max_tokens=_TOKENS,
            ignore_eos=True,
            cache_prompt=False,
        )
        return sum([reply.HasField("chunk") async for reply in stub.Generate(request)])

    begun_s = time.perf_counter()
    counts = await asyncio.gather(*(stream(number) for number in range(_STREAMS)))
    return sum(counts) / (time.perf_counter() - begun_s)


async def _scrape(url: str, is_on: asyncio.Event) -> None:
    async with httpx.AsyncClient() as http:
        while True:
            await is_on.wait()
            (await http.get(f"{url}/metrics")).raise_for_status()
            await asyncio.sleep(1)


async def _measure(
    plain: str, watched: str, metrics: str, rounds: int
) -> list[tuple[float, float]]:
    is_on = asyncio.Event()
    scraping = asyncio.create_task(_scrape(metrics, is_on))
    found: list[tuple[float, float]] = []
    async with (
        grpc.aio.insecure_channel(plain) as without,
        grpc.aio.insecure_channel(watched) as with_both,
    ):
        for number in range(-1, rounds):
            rates = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                is_on.set() if which else is_on.clear()
                rates[which] = await _rate(with_both if which else without)
            if number >= 0:
                found.append((rates[0], rates[1]))
                print(f"{rates[0]:.1f} {rates[1]:.1f} {rates[1] / rates[0]:.4f}", flush=True)
    scraping.cancel()
    return found


def main(model: str, rounds: int) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    flags = ("-m", model, "-c", "8192", "-np", "8", "--cache-ram", "0", "--grpc-port", "0")
    watching = ("--metrics-port", "0", "--otlp-endpoint", f"http://127.0.0.1:{port}")
    with (
        running("kvarts-service", *flags) as plain,
        running("kvarts-service", *flags, *watching) as watched,
    ):
        places = plain.ready().grpc_address(), watched.ready().grpc_address()
        found = asyncio.run(_measure(*places, watched.metrics_url(), rounds))
    server.stop(None)
    ratios = [both / neither for neither, both in found]
    print(
        f"median of {rounds} pairs {statistics.median(ratios):.4f}, mean {statistics.mean(ratios):.4f}, "
        f"{collector.num_spans} spans"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)

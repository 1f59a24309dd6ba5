"""`python -m tests.bench.clients`: several streams at once, over gRPC or HTTP, timed by message.

Messages are read when the clock has stopped, so that the clients cost the measured machine as
little as clients can; all streams share one thread, and over gRPC one connection.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from kvarts.v1 import common_pb2, generation_pb2

from tests.bench.child import answer_all

# Until the streams that others run beside have begun.
_SETTLE_S = 0.5
_METHOD = "/kvarts.v1.GenerationService/Generate"


@dataclass
class Stream:
    """When the request left, when each token came (seconds on one clock), and what was said."""

    sent_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list[float])
    progress_s: list[float] = field(default_factory=list[float])

    def to_json(self) -> dict[str, Any]:
        """As the parent reads it."""
        return {"sent_s": self.sent_s, "tokens_s": self.tokens_s, "progress_s": self.progress_s}


def answer(question: Mapping[str, Any]) -> Any:
    """Runs `prompts` over the door that `do` names; returns a `Stream` each.

    Over gRPC `grammar` restricts all of them. The prompt at index i leaves once stream `after[i]` has
    shown its first progress (-1: at once). `do` of "beside" is `beside`'s, and returns its waits.
    """
    if question["do"] == "beside":
        own = question["address"], question["port"]
        return asyncio.run(beside(*own, question["prompts"], question["tokens"]))
    prompts, tokens = question["prompts"], question["tokens"]
    after = question.get("after") or [-1] * len(prompts)
    if question["do"] == "grpc":
        grammar = question.get("grammar", "")
        work = over_grpc(question["address"], prompts, tokens, after, grammar)
    else:
        work = over_http(question["port"], prompts, tokens)
    return [stream.to_json() for stream in asyncio.run(work)]


async def over_grpc(
    address: str,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    after: Sequence[int],
    grammar: str = "",
) -> list[Stream]:
    """One call per prompt."""
    streams = [Stream() for _ in prompts]
    has_begun = [asyncio.Event() for _ in prompts]
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        # Not parsed on arrival: the bytes of a message are kept with their time.
        generate = cast("Any", channel).unary_stream(_METHOD)

        async def run(i: int) -> None:
            if after[i] >= 0:
                await has_begun[after[i]].wait()
            is_watched = i in after
            request = generation_pb2.GenerateRequest(
                tokens=common_pb2.TokenIds(ids=prompts[i]),
                sampling=generation_pb2.SamplingParams(temperature=0),
                max_tokens=tokens[i],
                ignore_eos=True,
                cache_prompt=False,
                return_progress=is_watched,
            )
            if grammar:
                request.grammar = grammar
            stream, heard = streams[i], list[tuple[float, bytes]]()
            stream.sent_s = time.perf_counter()
            call = generate(request.SerializeToString())
            while (data := await call.read()) is not grpc.aio.EOF:
                heard.append((time.perf_counter(), data))
                if is_watched and len(heard) == 3:  # started, its first progress, and a chunk's
                    has_begun[i].set()
            for at_s, data in heard:
                event = generation_pb2.GenerateResponse.FromString(data).WhichOneof("event")
                if event == "chunk":
                    stream.tokens_s.append(at_s)
                elif event == "progress":
                    stream.progress_s.append(at_s)

        await asyncio.gather(*(run(i) for i in range(len(prompts))))
    return streams


async def over_http(
    port: int, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> list[Stream]:
    """One connection and one streamed /completion per prompt."""

    async def run(prompt: Sequence[int], count: int) -> Stream:
        body = json.dumps(
            {
                "prompt": prompt,
                "n_predict": count,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stream, heard = Stream(), list[tuple[float, bytes]]()
        stream.sent_s = time.perf_counter()
        writer.write(head.encode() + body)
        while data := await reader.read(1 << 16):
            heard.append((time.perf_counter(), data))
        writer.close()
        for at_s, data in heard:
            stream.tokens_s += [at_s] * data.count(b'"stop":false')
        return stream

    return await asyncio.gather(*(run(p, n) for p, n in zip(prompts, tokens, strict=True)))


async def beside(
    address: str, port: int, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> dict[str, list[float]]:
    """One short request after another beside running ones, over each door in turn.

    Returns:
        Seconds to the first token by door, as many of both.
    """
    waits: dict[str, list[float]] = {"HTTP": [], "gRPC": []}
    probe, count = [[1, 300]], [2]
    running = asyncio.gather(over_grpc(address, prompts, tokens, [-1] * len(prompts)))
    await asyncio.sleep(_SETTLE_S)
    while not running.done():
        pair = {
            "HTTP": await over_http(port, probe, count),
            "gRPC": await over_grpc(address, probe, count, [-1]),
        }
        if running.done():
            break  # these two were not both beside all of them
        for door, (stream,) in pair.items():
            waits[door].append(stream.tokens_s[0] - stream.sent_s)
    await running
    return waits


if __name__ == "__main__":
    answer_all(answer)

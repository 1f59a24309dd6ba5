"""Servers: 1 and 8 streams at once over gRPC and HTTP, and what serving costs beside the engine.

Tokens per second are those of the time in which all streams decode: from the last stream's first
token to the first stream's last. The time to the first token is a figure of its own, of several bursts
in each round: streams that begin together begin in few steps, so that of one burst it goes by whole
steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from tests.bench.child import Child
from tests.bench.engine_speed import DECODE_STEPS
from tests.bench.figures import Figure
from tests.bench.models import Model
from tests.bench.servers import OwnServer, PeerServer
from tests.bench.setting import OWN, PEER, Setting, Turn

_STREAMS = (1, 8)
_BURSTS, _BURST_TOKENS = 9, 4
_CONTEXT_TOKENS = 4096
_SERVED_SHARE = 0.9
_HTTP_SHARE = 0.9
_HTTP_LATER_MS = 3.0
# Of streams that run while one more is asked for again and again.
_BESIDE_STREAMS, _BESIDE_TOKENS = 7, 300


def measure(setting: Setting) -> Iterator[Figure]:
    """Rates and waits of every model."""
    for model in setting.models:
        setting.say(f"served: {model.name}")
        medians = _medians(setting, model)
        ours, peer = medians[OWN], medians.get(PEER, {})
        yield from _of_one_more(model, ours)
        for streams in _STREAMS:
            for door in ("gRPC", "HTTP"):
                yield from _of_door(model, door, streams, ours, peer)
            yield from _of_gateway(model, streams, ours)
            served, alone = ours[_rate("gRPC", streams)], medians["engine"][str(streams)]
            title = f"{model.name}: gRPC over engine alone, {_count(streams)}"
            yield Figure("served", title, "ratio", served / alone, None, _SERVED_SHARE, False)


def _of_one_more(model: Model, ours: Mapping[str, float]) -> Iterator[Figure]:
    """What the gateway costs a request beside others; they do not begin together here."""
    title = f"{model.name}: HTTP behind gRPC, one more beside {_BESIDE_STREAMS}, first token"
    later = ours["HTTP beside"] - ours["gRPC beside"]
    yield Figure("served", title, "ms", later, None, _HTTP_LATER_MS, False, True)


def _of_door(
    model: Model, door: str, streams: int, ours: Mapping[str, float], peer: Mapping[str, float]
) -> Iterator[Figure]:
    bar = model.bars.streams if streams > 1 else None
    # The peer has one door: it is compared to both of ours.
    rate, wait = _rate(door, streams), _wait(door, streams)
    other_rate, other_wait = peer.get(_rate("HTTP", streams)), peer.get(_wait("HTTP", streams))
    title = f"{model.name}: {door}, {_count(streams)}"
    yield Figure("served", title, "tokens/s", ours[rate], other_rate, bar)
    yield Figure("served", f"{title}, first token", "ms", ours[wait], other_wait)


def _of_gateway(model: Model, streams: int, ours: Mapping[str, float]) -> Iterator[Figure]:
    """What the gateway costs beside gRPC; the bars are for many streams."""
    is_many = streams > 1
    share = ours[_rate("HTTP", streams)] / ours[_rate("gRPC", streams)]
    title = f"{model.name}: HTTP over gRPC, {_count(streams)}"
    yield Figure("served", title, "ratio", share, None, _HTTP_SHARE if is_many else None, False)
    later = ours[_wait("HTTP", streams)] - ours[_wait("gRPC", streams)]
    bar = _HTTP_LATER_MS if is_many else None
    title = f"{model.name}: HTTP behind gRPC, {_count(streams)}, first token"
    yield Figure("served", title, "ms", later, None, bar, False, True)


def _medians(setting: Setting, model: Model) -> dict[str, dict[str, float]]:
    with ExitStack() as stack:
        clients = stack.enter_context(Child("tests.bench.clients", []))
        engine = stack.enter_context(setting.engines(model, peer=False))[OWN]
        own = stack.enter_context(setting.own_server(model, context_tokens=_CONTEXT_TOKENS))
        sides: dict[str, Turn] = {
            OWN: lambda: _own_turn(clients, own),
            "engine": lambda: {
                str(n): engine.ask(do="decode", rows=n, steps=DECODE_STEPS) for n in _STREAMS
            },
        }
        peer = setting.peer_server(model, context_tokens=_CONTEXT_TOKENS)
        if peer is not None:
            server: PeerServer = stack.enter_context(peer)
            sides[PEER] = lambda: _http_turn(clients, server.port)
        for turn in sides.values():
            turn()  # the first requests of a process pay for what the others find there
        return setting.alternate(sides)


def _own_turn(clients: Child, server: OwnServer) -> dict[str, float]:
    values = _door_turn(partial(clients.ask, do="grpc", address=server.grpc_address), "gRPC")
    return values | _http_turn(clients, server.port) | _beside(clients, server)


def _beside(clients: Child, server: OwnServer) -> dict[str, float]:
    prompts = [[1, 202 + i] for i in range(_BESIDE_STREAMS)]
    waits = clients.ask(
        do="beside",
        address=server.grpc_address,
        port=server.port,
        prompts=prompts,
        tokens=[_BESIDE_TOKENS] * _BESIDE_STREAMS,
    )
    return {f"{door} beside": 1e3 * statistics.median(times) for door, times in waits.items()}


def _http_turn(clients: Child, port: int) -> dict[str, float]:
    return _door_turn(partial(clients.ask, do="http", port=port), "HTTP")


def _door_turn(ask: Callable[..., Any], door: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for streams in _STREAMS:
        values[_rate(door, streams)] = common_rate(ask(**_questions(streams, DECODE_STEPS)))
        bursts = [ask(**_questions(streams, _BURST_TOKENS)) for _ in range(_BURSTS)]
        values[_wait(door, streams)] = statistics.median(map(first_wait_ms, bursts))
    return values


def _questions(streams: int, tokens: int) -> dict[str, Any]:
    prompts = [[1, 102 + i] for i in range(streams)]
    return {"prompts": prompts, "tokens": [tokens] * streams}


def common_rate(heard: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second of all streams while each of them decodes."""
    begin_s = max(stream["tokens_s"][0] for stream in heard)
    end_s = min(stream["tokens_s"][-1] for stream in heard)
    inside = sum(begin_s < at_s <= end_s for stream in heard for at_s in stream["tokens_s"])
    return inside / (end_s - begin_s)


def first_wait_ms(heard: Sequence[Mapping[str, Any]]) -> float:
    """The median stream's time from its request to its first token."""
    waits = [stream["tokens_s"][0] - stream["sent_s"] for stream in heard]
    return 1e3 * statistics.median(waits)


def _rate(door: str, streams: int) -> str:
    return f"{door} {streams} rate"


def _wait(door: str, streams: int) -> str:
    return f"{door} {streams} wait"


def _count(streams: int) -> str:
    return f"{streams} stream{'s' if streams > 1 else ''}"

"""The first token of a short prompt while a long one is read, against alone, counted in chunks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from tests.bench.child import Child
from tests.bench.figures import Figure
from tests.bench.servers import OwnServer
from tests.bench.setting import OWN, Setting

_LONG_TOKENS = 4000
_CONTEXT_TOKENS = 8192
_MOST_CHUNKS = 1.0


def measure(setting: Setting) -> Iterator[Figure]:
    """The first model alone; the short prompt leaves when a chunk of the long one has begun."""
    model = setting.models[0]
    setting.say(f"first token: {model.name}")
    with (
        Child("tests.bench.clients", []) as clients,
        setting.own_server(model, context_tokens=_CONTEXT_TOKENS) as server,
    ):
        _turn(clients, server)
        values = setting.alternate({OWN: lambda: _turn(clients, server)})[OWN]
    name = f"{model.name}: first token of a short prompt"
    yield Figure("first_token", f"{name}, alone", "ms", values["alone"])
    yield Figure("first_token", f"{name}, beside one of {_LONG_TOKENS}", "ms", values["beside"])
    yield Figure("first_token", f"{model.name}: a chunk of the long prompt", "ms", values["chunk"])
    late = values["late"]
    name = f"{name}, how much later"
    yield Figure("first_token", name, "chunks", late, None, _MOST_CHUNKS, False, True)


def _turn(clients: Child, server: OwnServer) -> dict[str, float]:
    short, long = [1, 300, 301], [(11 * i) % 900 + 50 for i in range(_LONG_TOKENS)]
    door = {"do": "grpc", "address": server.grpc_address}
    (alone,) = clients.ask(**door, prompts=[short], tokens=[4])
    slow, beside = clients.ask(**door, prompts=[long, short], tokens=[1, 4], after=[-1, 0])
    # The first progress comes before any chunk. The chunk that ran while the short prompt came is
    # the third; its time, and that of those behind it, is the measure.
    ends = slow["progress_s"][1:]
    chunk = statistics.median(later - earlier for earlier, later in pairwise(ends))
    waits = _wait_s(alone), _wait_s(beside)
    return {
        "alone": 1e3 * waits[0],
        "beside": 1e3 * waits[1],
        "chunk": 1e3 * chunk,
        "late": (waits[1] - waits[0]) / chunk,
    }


def _wait_s(stream: Mapping[str, Any]) -> float:
    return stream["tokens_s"][0] - stream["sent_s"]

"""Saving and restoring slots beside prefill, disk and hash; GET /slots during a long prompt."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator

from tests.bench.child import Child
from tests.bench.figures import Figure
from tests.bench.models import Model
from tests.bench.servers import OwnServer
from tests.bench.setting import OWN, Setting

_SIZES = (512, 4000)
# About 200 MB of SmolLM2's keys and values.
_LARGE_TOKENS = 8000
_MB = 1e6
_LEAST_GAIN = 20.0
_LEAST_SHARE = 0.6
_LIST_MS = 5.0
_NUM_LISTS = 100


def measure(setting: Setting) -> Iterator[Figure]:
    """The first model alone."""
    model = setting.models[0]
    setting.say(f"slots: {model.name}")
    arguments = [str(model.path), str(setting.threads), setting.kernels, setting.compile_cache]
    with Child("tests.bench.own_slots", arguments) as child:
        values = setting.alternate({OWN: lambda: _turn(child)})[OWN]
    for size in _SIZES:
        name = f"{model.name}: restore of {size} tokens, times faster than prefill"
        yield Figure("slots", name, "", values[f"gain {size}"], None, _LEAST_GAIN, False)
    for what in ("save", "restore"):
        name = f"{model.name}: {what} of {_LARGE_TOKENS} tokens"
        yield Figure("slots", name, "MB/s", values[what] / _MB)
        name = f"{model.name}: {what}, share of the slower of disk and SHA-256"
        yield Figure("slots", name, "", values[f"{what} share"], None, _LEAST_SHARE, False)
        name = f"{model.name}: longest pause of a stream beside a {what}, of a prefill chunk"
        yield Figure("slots", name, "", values[f"{what} stall"], None, 1.0, False, True)
    name = f"{model.name}: GET /slots during a prompt of {_SIZES[-1]}, median"
    yield Figure("slots", name, "ms", _list_ms(setting, model), None, _LIST_MS, False, True)


def _turn(child: Child) -> dict[str, float]:
    values: dict[str, float] = {}
    for size in _SIZES:
        times = child.ask(do="restore", tokens=size)
        values[f"gain {size}"] = times["prefill_s"] / times["restore_s"]
    large = child.ask(do="restore", tokens=_LARGE_TOKENS)
    probe = child.ask(do="disk", bytes=int(large["bytes"]))
    stalls = child.ask(do="stall", tokens=_LARGE_TOKENS)
    for what in ("save", "restore"):
        rate = large["bytes"] / large[f"{what}_s"]
        values |= {what: rate, f"{what} share": rate / min(probe.values())}
        values[f"{what} stall"] = stalls[what] / stalls["chunk"]
    return values


def _list_ms(setting: Setting, model: Model) -> float:
    with (
        Child("tests.bench.clients", []) as clients,
        setting.own_server(model, context_tokens=8192) as server,
    ):
        prompt = [(11 * i) % 900 + 50 for i in range(_SIZES[-1])]
        question = {"do": "grpc", "address": server.grpc_address, "prompts": [prompt]}
        reading = threading.Thread(target=lambda: clients.ask(**question, tokens=[1]))
        reading.start()
        times = _lists(server, reading)
        reading.join()
    return 1e3 * statistics.median(times)


def _lists(server: OwnServer, reading: threading.Thread) -> list[float]:
    """Times of lists while the prompt is read, and none before it is."""
    while b'"is_processing":true' not in server.get("/slots"):
        assert reading.is_alive(), "the prompt was read before it was seen"
    times: list[float] = []
    while reading.is_alive() and len(times) < _NUM_LISTS:
        began_s = time.perf_counter()
        server.get("/slots")
        times.append(time.perf_counter() - began_s)
    return times

"""Ready with an empty and with a warm compile cache, and the memory of the service."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from tests.bench.child import Child
from tests.bench.figures import Figure
from tests.bench.models import Model
from tests.bench.setting import Setting

_CONTEXT_TOKENS = 4096
_READY_S = 3.0
_FILE_FACTOR = 1.25
_FIXED_BYTES = 350e6


def measure(setting: Setting) -> Iterator[Figure]:
    """Every model; the bar on the start is SmolLM2's, the first."""
    for model in setting.models:
        setting.say(f"start: {model.name}")
        bar = _READY_S if model is setting.models[0] else None
        with tempfile.TemporaryDirectory() as folder:
            fresh = replace(setting, compile_cache=folder)
            cold_s = _ready_s(fresh, model)
            warm_s = statistics.median(_ready_s(fresh, model) for _ in range(setting.rounds))
            peak, pools = _memory(fresh, model)
        yield Figure("start", f"{model.name}: ready, empty compile cache", "s", cold_s)
        name = f"{model.name}: ready, warm compile cache"
        yield Figure("start", name, "s", warm_s, None, bar, False, True)
        bound = model.path.stat().st_size * _FILE_FACTOR + pools + _FIXED_BYTES
        name = f"{model.name}: peak memory, file {_FILE_FACTOR} times + pools + 350"
        yield Figure("start", name, "MB", peak / 1e6, None, round(bound / 1e6), False, True)


def _ready_s(setting: Setting, model: Model) -> float:
    with setting.own_server(model, context_tokens=_CONTEXT_TOKENS) as server:
        return server.ready_s


def _memory(setting: Setting, model: Model) -> tuple[float, float]:
    """Peak bytes of the service after 8 streams, and the bytes of its pools."""
    with (
        Child("tests.bench.clients", []) as clients,
        setting.own_server(model, context_tokens=_CONTEXT_TOKENS) as server,
    ):
        prompts = [[1 + i] * 400 for i in range(8)]
        clients.ask(do="grpc", address=server.grpc_address, prompts=prompts, tokens=[32] * 8)
        return float(server.peak_bytes()), server.metric("kvarts_pool_bytes")

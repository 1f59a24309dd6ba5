"""Decode of one stream while one other process keeps a core busy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from tests.bench.figures import Figure
from tests.bench.models import Model
from tests.bench.setting import OWN, PEER, Setting, Turn

_LEAST_RATIO = 5.0
# Fewer than elsewhere: a peer that collapses takes seconds for each.
_STEPS = 32


def measure(setting: Setting) -> Iterator[Figure]:
    """The first model alone: what collapses is how threads wait, whatever they multiply."""
    model = setting.models[0]
    setting.say(f"busy box: {model.name}")
    alone, beside = _medians(setting, model)
    peer_alone, peer_beside = alone.get(PEER), beside.get(PEER)
    title = f"{model.name}: decode beside a busy process"
    yield Figure("busy", title, "tokens/s", beside[OWN], peer_beside, _LEAST_RATIO)
    title = f"{model.name}: the same over decode alone"
    kept = peer_beside / peer_alone if peer_beside and peer_alone else None
    yield Figure("busy", title, "share", beside[OWN] / alone[OWN], kept)


def _medians(setting: Setting, model: Model) -> tuple[dict[str, float], dict[str, float]]:
    with setting.engines(model) as engines:

        def turn(side: str) -> Turn:
            return lambda: {"rate": engines[side].ask(do="decode", rows=1, steps=_STEPS)}

        sides = {side: turn(side) for side in (OWN, PEER) if side in engines}
        alone = setting.alternate(sides)
        with _busy_process():
            beside = setting.alternate(sides)
    return ({side: alone[side]["rate"] for side in sides}, {s: beside[s]["rate"] for s in sides})


@contextmanager
def _busy_process() -> Generator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()

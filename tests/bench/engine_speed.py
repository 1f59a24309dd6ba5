"""Engines alone: a prompt of 512, a decode of 128, and 4 and 8 sequences together."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.child import Child
from tests.bench.figures import Figure
from tests.bench.models import Model
from tests.bench.setting import OWN, PEER, Setting, Turn

PROMPT_TOKENS = 512
DECODE_STEPS = 128
_ROWS = (1, 4, 8)
_PREFILL = f"prefill {PROMPT_TOKENS}"


def measure(setting: Setting) -> Iterator[Figure]:
    """Tokens per second of every model."""
    for model in setting.models:
        setting.say(f"engine: {model.name}")
        medians = _medians(setting, model)
        bars = {_PREFILL: model.bars.prefill, _decode(1): model.bars.decode}
        for name, ours in medians[OWN].items():
            peer = medians.get(PEER, {}).get(name)
            title = f"{model.name}: {name}"
            yield Figure("engine", title, "tokens/s", ours, peer, bars.get(name))


def _medians(setting: Setting, model: Model) -> dict[str, dict[str, float]]:
    with setting.engines(model) as engines:
        sides: dict[str, Turn] = {OWN: lambda: _rates(engines[OWN])}
        if PEER in engines:
            sides[PEER] = lambda: _rates(engines[PEER]) | _named_rates(setting, model)
        elif setting.peer.bench is not None:
            sides[PEER] = lambda: _named_rates(setting, model)
        return setting.alternate(sides)


def _rates(engine: Child) -> dict[str, float]:
    rates = {_PREFILL: engine.ask(do="prefill", tokens=PROMPT_TOKENS)}
    for rows in _ROWS:
        rates[_decode(rows)] = engine.ask(do="decode", rows=rows, steps=DECODE_STEPS)
    return rates


def _named_rates(setting: Setting, model: Model) -> dict[str, float]:
    """What the peer's own program says, where one was named; it then counts."""
    if setting.peer.bench is None:
        return {}
    prefill, decode = setting.peer.bench_rates(
        model.path, prompt=PROMPT_TOKENS, steps=DECODE_STEPS, threads=setting.threads
    )
    return {_PREFILL: prefill, _decode(1): decode}


def _decode(rows: int) -> str:
    return f"decode, {rows} row{'s' if rows > 1 else ''}"

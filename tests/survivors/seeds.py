"""Sound models to damage, of all that the native kernels compute: number types, families, states.

A seed is a few hundred kilobytes, so that what surrounds it in memory is never far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from engine.gguf.reader import GgufFile
from tests.families import FAMILIES, write_family
from tests.ggufs import TinyLlama, write_llama
from tests.recurrent_families import FAMILIES as RECURRENT
from tests.recurrent_families import write_recurrent
from tests.unit.engine.gguf.mutants import Field, fields

_NARROW = TinyLlama(num_layers=2)
_WIDE = TinyLlama(num_layers=1, width=256, num_heads=4, num_kv_heads=2, hidden=256)
_NARROW_TYPES = (
    *(Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1),
    *(Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL, Type.MXFP4),
)
_WIDE_TYPES = (
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_XS, Type.IQ2_XXS, Type.IQ3_S, Type.IQ1_M, Type.TQ2_0),
)
# Their experts lie in a few slots and are read from the file as they are asked for.
_IN_SLOTS = ("olmoe", "gpt-oss")


@dataclass(frozen=True)
class Seed:
    """A sound file: its integers of the head, and each tensor's first byte and one past its last.

    With `expert_slots` only so many experts are in memory.
    """

    name: str
    data: bytes
    fields: tuple[Field, ...]
    tensors: tuple[tuple[int, int], ...]
    expert_slots: int | None = None


def write_seeds(folder: Path) -> Mapping[str, Seed]:
    """Every seed by name, the same bytes each time."""
    paths: dict[str, Path] = {}
    for index, kind in enumerate((*_NARROW_TYPES, *_WIDE_TYPES)):
        name = f"llama-{kind.name}"
        model = _NARROW if kind in _NARROW_TYPES else _WIDE
        tokenizer = "bpe" if index % 2 else "spm"
        tiny = replace(model, ggml_type=kind, tokenizer=tokenizer, tied_head=index % 3 == 0)
        paths[name] = write_llama(folder / f"{name}.gguf", tiny)
    kinds = (Type.Q8_0, Type.Q4_0, Type.F16, Type.Q5_1)
    for index, (name, family) in enumerate(FAMILIES.items()):
        kind = Type.MXFP4 if name == "gpt-oss" else kinds[index % len(kinds)]
        path = folder / f"{name}.gguf"
        paths[name] = write_family(path, family, has_tokenizer=True, ggml_type=kind)
    for name in RECURRENT:
        paths[name] = write_recurrent(folder / f"{name}.gguf", name, has_tokenizer=True)
    seeds = {name: _read(name, path) for name, path in paths.items()}
    few = {f"{name}-slots": replace(seeds[name], expert_slots=16) for name in _IN_SLOTS}
    return seeds | {name: replace(seed, name=name) for name, seed in few.items()}


def _read(name: str, path: Path) -> Seed:
    data = path.read_bytes()
    with GgufFile.open(path) as file:
        spans = tuple((info.offset, info.offset + info.nbytes) for info in file.tensors.values())
    path.unlink()
    return Seed(name, data, tuple(fields(data)), spans)

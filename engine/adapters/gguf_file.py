"""llama.cpp's LoRA files: a GGUF of type `adapter` with `.lora_a` and `.lora_b` pairs.

Source: llama_adapter_lora_init_impl, whose rules these are; what it only logs or asserts is
refused here by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from engine.adapters.content import (
    AdapterContent,
    Pair,
    Values,
    from_bytes,
    join_numbers,
    make_content,
    scale_factor,
)
from engine.adapters.errors import AdapterFileInvalid, AdapterFileNotFound, AdapterMismatch
from engine.adapters.fit import TargetModel, check_pair, check_values, check_whole
from engine.adapters.regular_file import RegularFile
from engine.errors import ModelFileError, NotSupported
from engine.gguf.blocks import dequantise
from engine.gguf.header import TensorInfo, parse_header
from engine.gguf.metadata import Metadata

_DOWN, _UP, _IGNORED = ".lora_a", ".lora_b", "_norm.weight"
# Keys and tensor names; a vocabulary that somebody left in fits too.
_MAX_HEAD_BYTES = 16 << 20
_INVOCATION = "adapter.alora.invocation_tokens"
_NUMBERS = {
    GGMLQuantizationType.F32: "f32",
    GGMLQuantizationType.F16: "f16",
    GGMLQuantizationType.BF16: "bf16",
}


def read_gguf_adapter(path: Path, model: TargetModel, max_rank: int) -> AdapterContent:
    """Reads and checks an adapter.

    Raises:
        AdapterFileNotFound: There is no such file.
        AdapterFileInvalid: It is damaged, no GGUF, or no LoRA adapter.
        AdapterMismatch: It is another model's.
        RankTooLarge: Its rank is above `max_rank`.
    """
    if not path.exists():
        raise AdapterFileNotFound(path.name)
    try:
        with RegularFile(path, path.name) as file:
            return _read(file, model, max_rank)
    except ModelFileError as error:
        raise AdapterFileInvalid(error.path, error.detail) from error


def _read(file: RegularFile, model: TargetModel, max_rank: int) -> AdapterContent:
    name = file.name
    if not file.size:
        raise AdapterFileInvalid(name, "the file is empty")
    head = file.read(0, min(file.size, _MAX_HEAD_BYTES)).tobytes()
    header = parse_header(head, name, file_bytes=file.size)
    keys = Metadata(head, header.entries, name)
    _check_kind(keys, name, model)
    alpha = keys.get_float("adapter.lora.alpha") if "adapter.lora.alpha" in keys else None
    halves = _pair_up(header.tensors, name)
    # All shapes before any data: a file that does not fit costs no memory.
    ranks = {
        target: check_pair(name, model, max_rank, target, down_shape=down.shape, up_shape=up.shape)
        for target, (down, up) in halves.items()
    }
    pairs: dict[str, Pair] = {}
    for target, (down, up) in halves.items():
        factor = scale_factor(alpha, ranks[target])
        pairs[target] = _read_pair(file, target, (down, up), factor)
    content = make_content(
        pairs,
        alpha=alpha,
        task_name=keys.get_str("adapter.lora.task_name", ""),
        prompt_prefix=keys.get_str("adapter.lora.prompt_prefix", ""),
        invocation_tokens=_invocation_tokens(keys, name),
    )
    check_whole(name, model, content)
    return content


def _check_kind(keys: Metadata, name: str, model: TargetModel) -> None:
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        found = keys.get_str(key, "")
        if found != expected:
            raise AdapterFileInvalid(name, f"{key} is {found[:64]!r}, expected {expected!r}")
    architecture = keys.get_str("general.architecture")
    if architecture != model.architecture:
        expected, found = repr(model.architecture), repr(architecture[:64])
        raise AdapterMismatch(name, "general.architecture", expected, found)
    num_files = keys.get_uint("split.count", 0)
    if num_files > 1:
        raise AdapterFileInvalid(name, f"is one of {num_files} files, an adapter is one file")


def _pair_up(
    tensors: Mapping[str, TensorInfo], name: str
) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """The halves by the weight that they change, down then up; norms are ignored, as by the peer."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for tensor_name, info in tensors.items():
        target, dot, suffix = tensor_name.rpartition(".")
        if dot + suffix in (_DOWN, _UP):
            found.setdefault(target, {})[dot + suffix] = info
        elif not tensor_name.endswith(_IGNORED):
            raise AdapterFileInvalid(
                name, f"tensor {tensor_name[:128]!r} ends in neither {_DOWN} nor {_UP}"
            )
    for target, halves in found.items():
        for suffix in (_DOWN, _UP):
            if suffix not in halves:
                raise AdapterFileInvalid(name, f"tensor {target[:128]!r} has no {suffix[1:]} half")
    return {target: (halves[_DOWN], halves[_UP]) for target, halves in found.items()}


def _read_pair(
    file: RegularFile, target: str, halves: tuple[TensorInfo, TensorInfo], factor: float
) -> Pair:
    (down, down_number), (up, up_number) = (_values(file, info) for info in halves)
    up = np.ascontiguousarray(up.swapaxes(-1, -2))
    down, up, number = join_numbers(down, up, (down_number, up_number))
    pair = Pair(down, up, number, factor)
    check_values(file.name, target, pair)
    return pair


def _values(file: RegularFile, info: TensorInfo) -> tuple[Values, str]:
    """A tensor in its own precision, quantised ones as f32."""
    raw = file.read(info.offset, info.nbytes)
    number = _NUMBERS.get(info.ggml_type)
    if number is not None:
        return from_bytes(raw, number, info.shape), number
    try:
        return dequantise(info.ggml_type, raw, info.shape), "f32"
    except NotSupported as error:
        detail = f"tensor {info.name!r} has type {info.ggml_type.name}, which holds no numbers"
        raise AdapterFileInvalid(file.name, detail) from error


def _invocation_tokens(keys: Metadata, name: str) -> tuple[int, ...]:
    if _INVOCATION not in keys:
        return ()
    values = keys.get_array(_INVOCATION)
    if values.dtype != np.dtype(np.uint32):
        kind = GGUFValueType.UINT32.name.lower()
        raise AdapterFileInvalid(name, f"key {_INVOCATION!r} holds {values.dtype}, not {kind}")
    return tuple(int(value) for value in values)

"""Adapters as the peft library saves them: a folder with a configuration and a safetensors file.

Converted in memory to what llama.cpp's converter would have written: names of the GGUF, and rows of
query and key permuted where the model's own converter permuted them. What would be dropped or
computed otherwise (DoRA, biases, whole modules) is refused, never ignored.

Source: peft's LoraConfig; llama.cpp's convert_lora_to_gguf.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from engine.adapters.content import (
    EMBEDDING,
    AdapterContent,
    Pair,
    Values,
    join_numbers,
    make_content,
)
from engine.adapters.errors import AdapterFileInvalid, AdapterFileNotFound, AdapterMismatch
from engine.adapters.fit import TargetModel, check_pair, check_values, check_whole
from engine.adapters.safetensors_file import SafetensorsFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 4096
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?:embedding_)?(?P<half>[AB])(?:\.weight)?"
)
# Families whose queries and keys the converter reorders, because ggml pairs neighbours in rope.
_PERMUTED = frozenset({"llama", "granite", "granitemoe", "granitehybrid", "minicpm"})


@dataclass(frozen=True)
class _Config:
    """What of the configuration counts. Patterns replace a value for the modules that they name."""

    rank: int
    alpha: float
    has_root_scale: bool
    alpha_pattern: Mapping[str, float]
    task_name: str
    invocation_tokens: tuple[int, ...]

    def factor(self, module: str, rank: int) -> float:
        """Returns what multiplies the user's scale for a module of this rank."""
        alpha = next(
            (a for pattern, a in self.alpha_pattern.items() if _names(pattern, module)), self.alpha
        )
        return alpha / math.sqrt(rank) if self.has_root_scale else alpha / rank


def read_peft_adapter(folder: Path, model: TargetModel, max_rank: int) -> AdapterContent:
    """Reads and checks a folder.

    Raises:
        AdapterFileNotFound: A file of it is missing.
        AdapterFileInvalid: It is damaged, or not a plain LoRA adapter.
        AdapterMismatch: It is another model's.
        RankTooLarge: Its rank is above `max_rank`.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise AdapterFileNotFound(f"{folder.name}/{name}")
    config = _read_config(folder / CONFIG)
    file = SafetensorsFile(folder / WEIGHTS)
    halves = _pair_up(file, folder.name, model)
    for target, (_, down, up) in halves.items():
        shapes = file.tensors[down].shape, file.tensors[up].shape
        down_shape = shapes[0][::-1] if target == EMBEDDING else shapes[0]
        check_pair(folder.name, model, max_rank, target, down_shape=down_shape, up_shape=shapes[1])
    pairs = {
        target: _read_pair(file, folder.name, model, config, target, names)
        for target, names in halves.items()
    }
    content = make_content(
        pairs,
        alpha=config.alpha,
        task_name=config.task_name,
        invocation_tokens=config.invocation_tokens,
    )
    check_whole(folder.name, model, content)
    return content


def _read_config(path: Path) -> _Config:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise AdapterFileInvalid(path.name, f"is larger than {_MAX_CONFIG_BYTES} bytes")
        value: Any = json.loads(path.read_bytes())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise AdapterFileInvalid(path.name, f"cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterFileInvalid(path.name, "is no JSON") from error
    if not isinstance(value, dict):
        raise AdapterFileInvalid(path.name, "is no JSON object")
    keys = cast("dict[str, Any]", value)
    _refuse_other_methods(path.name, keys)
    rank = _number(path.name, "r", keys.get("r"))
    return _Config(
        rank=int(rank),
        alpha=_number(path.name, "lora_alpha", keys.get("lora_alpha")),
        has_root_scale=keys.get("use_rslora") is True,
        alpha_pattern=_patterns(path.name, keys.get("alpha_pattern")),
        task_name=task if isinstance(task := keys.get("task_type"), str) else "",
        invocation_tokens=_tokens(path.name, keys.get("alora_invocation_tokens")),
    )


def _refuse_other_methods(name: str, keys: Mapping[str, Any]) -> None:
    if keys.get("peft_type") != "LORA":
        found = str(keys.get("peft_type"))[:32]
        raise AdapterFileInvalid(name, f"peft_type is {found!r}, expected 'LORA'")
    if keys.get("bias", "none") != "none":
        raise AdapterFileInvalid(name, f"bias is {str(keys['bias'])[:32]!r}, expected 'none'")
    for key in ("use_dora", "use_qalora", "modules_to_save", "trainable_token_indices"):
        if keys.get(key):
            raise AdapterFileInvalid(name, f"{key} is set, which is more than a LoRA adapter")


def _pair_up(
    file: SafetensorsFile, name: str, model: TargetModel
) -> dict[str, tuple[str, str, str]]:
    """By target weight: the module, and the names of its down and its up half."""
    table = _name_map(name, model)
    found: dict[str, dict[str, str]] = {}
    for stored in file.tensors:
        match = _NAME.fullmatch(stored)
        if match is None:
            raise AdapterFileInvalid(name, f"tensor {stored[:128]!r} is no half of a LoRA pair")
        found.setdefault(match["module"], {})[match["half"]] = stored
    pairs: dict[str, tuple[str, str, str]] = {}
    for module, halves in found.items():
        for half in "AB":
            if half not in halves:
                raise AdapterFileInvalid(name, f"module {module[:128]!r} has no lora_{half}")
        base = table.get_name(module)
        if base is None:
            expected = f"a module of a {model.architecture} model"
            raise AdapterMismatch(name, module[:128], expected, "no such module")
        if f"{base}.weight" in pairs:
            raise AdapterFileInvalid(name, f"two modules change {base}.weight")
        pairs[f"{base}.weight"] = (module, halves["A"], halves["B"])
    return pairs


def _name_map(name: str, model: TargetModel) -> TensorNameMap:
    by_name = {text: arch for arch, text in MODEL_ARCH_NAMES.items()}
    architecture: MODEL_ARCH | None = by_name.get(model.architecture)
    if architecture is None:
        raise AdapterFileInvalid(name, f"no names are known of {model.architecture} modules")
    return get_tensor_name_map(architecture, model.num_layers)


def _read_pair(
    file: SafetensorsFile,
    name: str,
    model: TargetModel,
    config: _Config,
    target: str,
    names: tuple[str, str, str],
) -> Pair:
    module, down_name, up_name = names
    down, up = file.read(down_name), file.read(up_name)
    if target == EMBEDDING:
        down = down.T
    if model.architecture in _PERMUTED:
        up = _permuted(up, target, model)
    numbers = file.tensors[down_name].number, file.tensors[up_name].number
    down, up, number = join_numbers(down, np.ascontiguousarray(up.T), numbers)
    factor = config.factor(module, up.shape[0])
    pair = Pair(down, up, number, factor)
    if not math.isfinite(factor):
        raise AdapterFileInvalid(name, f"module {module[:128]!r} has a factor of {factor}")
    check_values(name, target, pair)
    return pair


def _permuted(up: Values, target: str, model: TargetModel) -> Values:
    """Moves the rows of a head from halves to neighbours, in queries and keys.

    Source: llama.cpp's converter, LlamaModel.permute.
    """
    kind = target.removesuffix(".weight").rpartition(".")[2]
    heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}.get(kind)
    if not heads:
        return up
    rows, rank = up.shape
    halves = up.reshape(heads, 2, rows // heads // 2, rank)
    return halves.swapaxes(1, 2).reshape(rows, rank)


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern names a module: by its end, at a dot.

    peft takes any regular expression; one from a file could run for hours, so only names are taken.
    """
    return module == pattern or module.endswith("." + pattern)


def _patterns(name: str, value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(cast("dict[str, Any]", value)) > _MAX_PATTERNS:
        raise AdapterFileInvalid(name, "alpha_pattern is no small object")
    patterns = cast("dict[str, Any]", value)
    for pattern in patterns:
        if re.fullmatch(r"[\w.]+", pattern) is None:
            raise AdapterFileInvalid(
                name, f"alpha_pattern {pattern[:64]!r} is more than the name of a module"
            )
    return {
        pattern: _number(name, f"alpha_pattern[{pattern[:64]!r}]", number)
        for pattern, number in patterns.items()
    }


def _number(name: str, key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e9:
        raise AdapterFileInvalid(name, f"{key} is {str(value)[:32]}, expected a number above 0")
    return float(value)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [None]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 32 for i in items):
        raise AdapterFileInvalid(name, "alora_invocation_tokens is no list of tokens")
    return tuple(items)

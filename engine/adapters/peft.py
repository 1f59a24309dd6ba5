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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np

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
from engine.adapters.peft_modules import Part, find_parts
from engine.adapters.regular_file import RegularFile
from engine.adapters.safetensors_file import SafetensorsFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 4096
_OTHER_METHODS = (
    *("use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices"),
    *("layer_replication", "target_parameters"),
)
# Those that leave the base as it is; others take what they put into the factors out of it.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
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
    with RegularFile(folder / WEIGHTS, WEIGHTS) as file:
        return _read(SafetensorsFile(file), folder.name, config, model, max_rank)


def _read(
    file: SafetensorsFile, name: str, config: _Config, model: TargetModel, max_rank: int
) -> AdapterContent:
    found = find_parts(file.tensors, name, model)
    for target, parts in found.items():
        down = _shape_of(file, name, parts, attrgetter("down"))
        up = _shape_of(file, name, parts, attrgetter("up"))
        down_shape = down[::-1] if target == EMBEDDING else down
        check_pair(name, model, max_rank, target, down_shape=down_shape, up_shape=up)
    pairs = {
        target: _read_pair(file, name, model, config, target, parts)
        for target, parts in found.items()
    }
    content = make_content(
        pairs,
        alpha=config.alpha,
        task_name=config.task_name,
        invocation_tokens=config.invocation_tokens,
    )
    check_whole(name, model, content)
    return content


def _read_config(path: Path) -> _Config:
    with RegularFile(path, path.name) as file:
        if file.size > _MAX_CONFIG_BYTES:
            raise AdapterFileInvalid(path.name, f"is larger than {_MAX_CONFIG_BYTES} bytes")
        text = file.read(0, file.size).tobytes()
    try:
        value: Any = json.loads(text)
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
    for key in _OTHER_METHODS:
        if keys.get(key):
            raise AdapterFileInvalid(name, f"{key} is set, which is more than a LoRA adapter")
    start = keys.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        shown = str(start)[:32]
        raise AdapterFileInvalid(
            name, f"init_lora_weights is {shown!r}: such a start may have changed the base weights"
        )


def _shape_of(
    file: SafetensorsFile, name: str, parts: Sequence[Part], half: Callable[[Part], str]
) -> tuple[int, ...]:
    """The shape of a half; of several experts, which must agree, with their number in front."""
    shapes = [file.tensors[half(part)].shape for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            raise AdapterMismatch(
                name, half(part)[:128], "x".join(map(str, shapes[0])), "x".join(map(str, shape))
            )
    return shapes[0] if len(parts) == 1 else (len(parts), *shapes[0])


def _read_pair(
    file: SafetensorsFile,
    name: str,
    model: TargetModel,
    config: _Config,
    target: str,
    parts: Sequence[Part],
) -> Pair:
    pairs = [_read_part(file, name, model, target, part) for part in parts]
    ranks = [up.shape[0] for _, up, _ in pairs]
    factors = {config.factor(part.module, rank) for part, rank in zip(parts, ranks, strict=True)}
    if len(factors) > 1 or len({number for _, _, number in pairs}) > 1:
        raise AdapterFileInvalid(name, f"experts of {target} differ in alpha or in number type")
    (factor,) = factors
    if not math.isfinite(factor):
        module = parts[0].module[:128]
        raise AdapterFileInvalid(name, f"module {module!r} has a factor of {factor}")
    number = pairs[0][2]
    if len(parts) == 1:
        pair = Pair(pairs[0][0], pairs[0][1], number, factor)
    else:
        downs, ups = (np.stack([one[half] for one in pairs]) for half in (0, 1))
        pair = Pair(downs, ups, number, factor)
    check_values(name, target, pair)
    return pair


def _read_part(
    file: SafetensorsFile, name: str, model: TargetModel, target: str, part: Part
) -> tuple[Values, Values, str]:
    """Down, up and their number type as a `Pair` has them."""
    down, up = file.read(part.down), file.read(part.up)
    if target == EMBEDDING:
        down = down.T
    if model.architecture in _PERMUTED:
        up = _permuted(up, target, model)
    numbers = file.tensors[part.down].number, file.tensors[part.up].number
    return join_numbers(down, np.ascontiguousarray(up.T), numbers)


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

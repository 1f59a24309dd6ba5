"""Which tensors of a peft folder change which weight: names of modules made names of the GGUF.

Where each expert is a module of its own and the model holds them as one stack, the experts of a
stack are brought together, as llama.cpp's converter does it. Knows no values.

Source: peft's names of LoRA parameters; llama.cpp's convert_lora_to_gguf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from engine.adapters.errors import AdapterFileInvalid, AdapterMismatch
from engine.adapters.fit import TargetModel

_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?:embedding_)?(?P<half>[AB])(?:\.weight)?"
)
_EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<number>[0-9]{1,6})\.(?P<kind>\w+)")


@dataclass(frozen=True)
class Part:
    """A module, and the tensors that hold its halves."""

    module: str
    down: str
    up: str


def find_parts(stored: Iterable[str], name: str, model: TargetModel) -> dict[str, tuple[Part, ...]]:
    """Returns what there is for each weight: one part, or one per expert in their order.

    Raises:
        AdapterFileInvalid: A tensor is no half of a pair, or a half, an expert or a name is missing.
        AdapterMismatch: The model has no such module.
    """
    table = _name_map(name, model)
    found: dict[str, dict[int, Part]] = {}
    for module, halves in _halves(stored, name).items():
        target, number = _target(table, module)
        if target is None:
            expected = f"a module of a {model.architecture} model"
            raise AdapterMismatch(name, module[:128], expected, "no such module")
        parts = found.setdefault(target, {})
        if number in parts:
            raise AdapterFileInvalid(name, f"two modules change {target}")
        parts[number] = Part(module, halves["A"], halves["B"])
    return {target: _in_order(name, target, parts, model) for target, parts in found.items()}


def _halves(stored: Iterable[str], name: str) -> Mapping[str, Mapping[str, str]]:
    """The tensors of each module, both there, by half."""
    found: dict[str, dict[str, str]] = {}
    for tensor in stored:
        match = _NAME.fullmatch(tensor)
        if match is None:
            raise AdapterFileInvalid(name, f"tensor {tensor[:128]!r} is no half of a LoRA pair")
        halves = found.setdefault(match["module"], {})
        if match["half"] in halves:
            raise AdapterFileInvalid(
                name, f"module {match['module'][:128]!r} has two lora_{match['half']}"
            )
        halves[match["half"]] = tensor
    for module, halves in found.items():
        for half in "AB":
            if half not in halves:
                raise AdapterFileInvalid(name, f"module {module[:128]!r} has no lora_{half}")
    return found


def _target(table: TensorNameMap, module: str) -> tuple[str | None, int]:
    """The weight of a module, and which part of it it is."""
    expert = _EXPERT.fullmatch(module)
    if expert is not None:
        stack = table.get_name(f"{expert['stack']}.{expert['kind']}")
        if stack is not None:
            return f"{stack}.weight", int(expert["number"])
    base = table.get_name(module)
    return (f"{base}.weight" if base is not None else None), 0


def _in_order(
    name: str, target: str, parts: Mapping[int, Part], model: TargetModel
) -> tuple[Part, ...]:
    shape = model.matrices.get(target, ())
    count = shape[0] if len(shape) > 2 else 1
    missing = [number for number in range(count) if number not in parts]
    if missing:
        raise AdapterFileInvalid(name, f"{target} has no pair of expert {missing[0]} of {count}")
    if len(parts) > count:
        found = f"expert {max(parts)}"
        raise AdapterMismatch(name, target, f"experts 0 to {count - 1}", found)
    return tuple(parts[number] for number in range(count))


def _name_map(name: str, model: TargetModel) -> TensorNameMap:
    by_name = {text: arch for arch, text in MODEL_ARCH_NAMES.items()}
    architecture: MODEL_ARCH | None = by_name.get(model.architecture)
    if architecture is None:
        raise AdapterFileInvalid(name, f"no names are known of {model.architecture} modules")
    return get_tensor_name_map(architecture, model.num_layers)

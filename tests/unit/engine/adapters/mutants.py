"""Damaged adapters, made by changing what the structure of a file says, and the checks on them.

    python -m tests.unit.engine.adapters.mutants 20000

runs as many as asked for; the tests run a few hundred. Seeds are GGUF files of every number type
and peft folders, of which the configuration or the tensors are changed. A mutant is named by its
seed and its number, and the same name always gives the same bytes.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
from gguf import GGMLQuantizationType as Type

from engine.adapters.content import EMBEDDING, AdapterContent, all_finite
from engine.adapters.fit import MAX_INVOCATION_TOKENS, TargetModel
from engine.adapters.source import read_adapter
from tests.adapters import TinyAdapter, write_adapter, write_peft
from tests.unit.engine.gguf.mutants import Outcome, fields, interesting, mutate, report, watched

SHAPES = {
    EMBEDDING: (40, 32),
    "blk.0.attn_q.weight": (16, 32),
    "blk.0.ffn_up_exps.weight": (3, 32, 32),
}
MODEL = TargetModel("qwen3moe", 40, SHAPES, num_layers=1, num_heads=2, num_kv_heads=1)
MAX_RANK = 32
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "base_model.model.model"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "F32", "x" * 300, [], {}, [[[]]], 0, -1, 1, 1.5, -0.0),
    *(2**31 - 1, 2**31, 2**47, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400, 1e308),
    *(float("nan"), float("inf"), [0, 0], [-1, 4], [4, 0], ["0", "4"], [2**63, 2**63 + 4]),
)


def write_seeds(folder: Path) -> dict[str, bytes]:
    """Sound adapters to start from: GGUF files by name, and the files of peft folders."""
    base = TinyAdapter(architecture="qwen3moe", rank=4)
    for kind in (Type.F32, Type.F16, Type.BF16):
        adapter = TinyAdapter(
            architecture="qwen3moe",
            rank=4,
            ggml_type=kind,
            keys={
                "adapter.lora.task_name": "poem",
                "adapter.lora.prompt_prefix": "Write",
            },
        )
        write_adapter(folder / f"{kind.name}.gguf", adapter, SHAPES, tuple(SHAPES))
    quantised = TinyAdapter(architecture="qwen3moe", rank=32, alpha=None, ggml_type=Type.Q8_0)
    write_adapter(folder / "Q8_0.gguf", quantised, SHAPES, ("blk.0.ffn_up_exps.weight",))
    activated = {"adapter.alora.invocation_tokens": np.array([3, 4, 5], np.uint32)}
    with_tokens = TinyAdapter(architecture="qwen3moe", rank=4, keys=activated)
    write_adapter(folder / "alora.gguf", with_tokens, SHAPES, ("blk.0.attn_q.weight",))
    write_peft(folder / "plain", _peft_tensors(base), {"alpha_pattern": {"q_proj": 2}})
    write_peft(
        folder / "activated",
        _peft_tensors(base),
        {"use_rslora": True, "alora_invocation_tokens": [3, 4], "modules_to_save": None},
    )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _peft_tensors(adapter: TinyAdapter) -> dict[str, Any]:
    rng = np.random.default_rng(adapter.seed)

    def pair(module: str, rows: int, cols: int) -> dict[str, Any]:
        return {
            f"{_HEAD}.{module}.lora_A.weight": rng.standard_normal((4, cols), np.float32),
            f"{_HEAD}.{module}.lora_B.weight": rng.standard_normal((rows, 4), np.float32),
        }

    tensors = pair("layers.0.self_attn.q_proj", 16, 32)
    for expert in range(3):
        tensors |= pair(f"layers.0.mlp.experts.{expert}.up_proj", 32, 32)
    return tensors


def load(path: Path) -> AdapterContent:
    """All that a server reads of an adapter; what gets through must fit the model to the letter."""
    content = read_adapter(path, MODEL, MAX_RANK)
    facts = content.facts
    assert facts.rank == max(pair.rank for pair in content.pairs.values()) <= MAX_RANK
    assert facts.nbytes == sum(pair.nbytes for pair in content.pairs.values())
    assert len(facts.invocation_tokens) <= MAX_INVOCATION_TOKENS
    assert all(0 <= token < MODEL.vocab_size for token in facts.invocation_tokens)
    for name, pair in content.pairs.items():
        *experts, rows, cols = SHAPES[name]
        if name == EMBEDDING:
            assert (pair.down.shape, pair.up.shape) == ((rows, pair.rank), (pair.rank, cols))
        else:
            assert pair.down.shape == (*experts, pair.rank, cols)
            assert pair.up.shape == (*experts, pair.rank, rows)
        assert all_finite(pair.down, pair.number)
        assert all_finite(pair.up, pair.number)
        assert np.isfinite(pair.factor)
    return content


def run(count: int, folder: Path) -> Iterator[Outcome]:
    """Loads `count` mutants; anything but a typed error goes through to the caller."""
    seeds = write_seeds(folder)
    places = {name: fields(data) for name, data in seeds.items() if name.endswith(".gguf")}
    names = list(seeds)

    def mutant(number: int) -> tuple[str, bytes]:
        name = names[number % len(names)]
        rng = np.random.default_rng([number, len(name)])
        data = seeds[name]
        if name in places:
            return name, mutate(rng, data, places[name])
        if name.endswith(".json"):
            return name, mutate_json(rng, data)
        return name, mutate_safetensors(rng, data)

    def restore(name: str) -> None:
        (folder / name).write_bytes(seeds[name])

    def write(number: int) -> tuple[str, Path]:
        name, data = mutant(number)
        path = folder / name
        path.write_bytes(data)
        return name, path if name in places else path.parent

    yield from watched(count, write, load, restore)


def mutate_json(rng: np.random.Generator, data: bytes) -> bytes:
    """Changes a value, a name or a byte of a document."""
    if rng.random() < 0.3:
        return _mutate_bytes(rng, data)
    root: Any = json.loads(data)
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        if isinstance(root, dict | list) and root:
            root = _mutate_tree(rng, root)
    text = json.dumps(root).encode()
    # An entry that is there twice, which no tree holds.
    if rng.random() < 0.1:
        text = text.replace(b", ", b", " + text[1:-1].partition(b", ")[0] + b", ", 1)
    return text


def mutate_safetensors(rng: np.random.Generator, data: bytes) -> bytes:
    """Changes the length, the head or the data of a file."""
    (length,) = struct.unpack_from("<Q", data)
    head, body = data[8 : 8 + length], data[8 + length :]
    match int(rng.integers(6)):
        case 0:
            value = interesting(rng, length, len(data)) % (1 << 64)
            return struct.pack("<Q", value) + head + body
        case 1:
            return _mutate_bytes(rng, data)
        case 2:
            damaged = np.frombuffer(body, np.float32).copy()
            damaged[rng.integers(len(damaged))] = rng.choice([np.nan, np.inf, -np.inf, 3e38])
            return struct.pack("<Q", length) + head + damaged.tobytes()
        case _:
            head = mutate_json(rng, head)
            return struct.pack("<Q", len(head)) + head + body


def _mutate_tree(rng: np.random.Generator, root: Any) -> Any:
    """The tree with one node replaced, renamed, moved, left out or nested."""
    nodes = list(_nodes(root))
    holder, key = nodes[rng.integers(len(nodes))]
    other, other_key = nodes[rng.integers(len(nodes))]
    match int(rng.integers(8)):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        case 2:
            holder[key] = deepcopy(other[other_key])
        case 3:
            for _ in range(int(rng.choice([1, 20, 100]))):
                holder[key] = [holder[key]]
        case 4 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] = interesting(rng, holder[key], 256)
        case _:
            holder[key] = deepcopy(_VALUES[rng.integers(len(_VALUES))])
    return root


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree: what holds it, and its key there."""
    for key in _keys(value):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _nodes(value[key])


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value))
    return list(range(len(value)))


def _mutate_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    mutant = bytearray(data)
    at = int(rng.integers(len(mutant)))
    match int(rng.integers(5)):
        case 0:
            mutant[at] ^= 1 << int(rng.integers(8))
        case 1:
            del mutant[at : at + int(rng.integers(1, 64))]
        case 2:
            mutant[at:at] = mutant[at : at + int(rng.integers(1, 64))]
        case 3:
            del mutant[at:]
        case _:
            mutant[at:at] = rng.choice([b"\x00", b"\xff\xfe", b"[" * 2000, b"9" * 5000, b"\\ud800"])
    return bytes(mutant)


def main() -> None:
    """Runs and reports."""
    with tempfile.TemporaryDirectory() as folder:
        report(list(run(int(sys.argv[1]), Path(folder))))


if __name__ == "__main__":
    main()

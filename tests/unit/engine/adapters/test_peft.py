"""Peft folders: converted as llama.cpp's converter does, or refused by name."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.errors import (
    AdapterFileInvalid,
    AdapterFileNotFound,
    AdapterMismatch,
    EngineError,
    RankTooLarge,
)
from engine.adapters.fit import TargetModel
from engine.adapters.source import read_adapter
from tests.adapters import write_peft, write_safetensors

SHAPES = {
    "token_embd.weight": (40, 16),
    "blk.0.attn_q.weight": (16, 16),
    "blk.0.attn_k.weight": (8, 16),
    "blk.0.attn_v.weight": (8, 16),
    "blk.0.ffn_down.weight": (16, 24),
}
LLAMA = TargetModel("llama", 40, SHAPES, num_layers=1, num_heads=2, num_kv_heads=1)
QWEN = TargetModel("qwen3", 40, SHAPES, num_layers=1, num_heads=2, num_kv_heads=1)
HEAD = "base_model.model.model.layers.0"
QUERY = f"{HEAD}.self_attn.q_proj"


def halves(module: str, rows: int, cols: int, rank: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(len(module))
    return {
        f"{module}.lora_A.weight": rng.standard_normal((rank, cols), np.float32),
        f"{module}.lora_B.weight": rng.standard_normal((rows, rank), np.float32),
    }


def test_names_and_factors(tmp_path: Path) -> None:
    tensors = halves(QUERY, 16, 16) | halves(f"{HEAD}.mlp.down_proj", 16, 24, rank=8)
    content = read_adapter(write_peft(tmp_path / "a", tensors), QWEN, 16)
    assert list(content.pairs) == ["blk.0.attn_q.weight", "blk.0.ffn_down.weight"]
    query, down = content.pairs.values()
    assert (query.factor, down.factor) == (2.0, 1.0)
    np.testing.assert_array_equal(query.down, tensors[f"{QUERY}.lora_A.weight"])
    np.testing.assert_array_equal(query.up, tensors[f"{QUERY}.lora_B.weight"].T)


def test_llama_queries_and_keys_are_permuted(tmp_path: Path) -> None:
    """Row `h * d + i` of a half goes to the place of its pair: brute force over the indexes."""
    modules = (("q_proj", 16, 2), ("k_proj", 8, 1), ("v_proj", 8, 0))
    tensors: dict[str, Any] = {}
    for name, rows, _ in modules:
        tensors |= halves(f"{HEAD}.self_attn.{name}", rows, 16)
    content = read_adapter(write_peft(tmp_path / "a", tensors), LLAMA, 16)
    for name, rows, heads in modules:
        up = tensors[f"{HEAD}.self_attn.{name}.lora_B.weight"]
        expected = up.copy()
        dim = rows // heads if heads else 0
        for head in range(heads):
            for i in range(dim // 2):
                expected[head * dim + 2 * i] = up[head * dim + i]
                expected[head * dim + 2 * i + 1] = up[head * dim + dim // 2 + i]
        got = content.pairs[f"blk.0.attn_{name[0]}.weight"]
        np.testing.assert_array_equal(got.up, expected.T)


def test_the_embedding_is_turned(tmp_path: Path) -> None:
    module = "base_model.model.model.embed_tokens"
    a, b = np.ones((4, 40), np.float32), np.ones((16, 4), np.float32)
    a[1, 2] = 7
    tensors = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    content = read_adapter(write_peft(tmp_path / "a", tensors), QWEN, 16)
    np.testing.assert_array_equal(content.pairs["token_embd.weight"].down, a.T)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 2.0),
    ],
)
def test_other_scales(tmp_path: Path, config: dict[str, Any], factor: float) -> None:
    content = read_adapter(write_peft(tmp_path / "a", halves(QUERY, 16, 16), config), QWEN, 16)
    assert content.pairs["blk.0.attn_q.weight"].factor == factor


def test_a_folder_and_a_gguf_of_the_same_values_are_the_same_adapter(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType as Type

    from tests.ggufs import write_gguf

    tensors = halves(QUERY, 16, 16)
    name = "blk.0.attn_q.weight"
    stored = {
        f"{name}.lora_a": (tensors[f"{QUERY}.lora_A.weight"], Type.F32),
        f"{name}.lora_b": (tensors[f"{QUERY}.lora_B.weight"], Type.F32),
    }
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    path = write_gguf(tmp_path / "a.gguf", keys, stored, architecture="qwen3")
    folder = write_peft(tmp_path / "a", tensors)
    assert read_adapter(path, QWEN, 16).facts.digest == read_adapter(folder, QWEN, 16).facts.digest


Refusal = tuple[dict[str, Any], dict[str, Any], type[EngineError], str]
REFUSED: dict[str, Refusal] = {
    "method": ({"peft_type": "IA3"}, {}, AdapterFileInvalid, "peft_type is 'IA3'"),
    "dora": ({"use_dora": True}, {}, AdapterFileInvalid, "use_dora is set"),
    "bias": ({"bias": "all"}, {}, AdapterFileInvalid, "bias is 'all'"),
    "modules": ({"modules_to_save": ["lm_head"]}, {}, AdapterFileInvalid, "modules_to_save"),
    "layers": ({"layer_replication": [[0, 1]]}, {}, AdapterFileInvalid, "layer_replication is set"),
    "start": (
        {"init_lora_weights": "pissa_niter_4"},
        {},
        AdapterFileInvalid,
        "init_lora_weights is 'pissa_niter_4'",
    ),
    "start of a list": ({"init_lora_weights": [1]}, {}, AdapterFileInvalid, "init_lora_weights"),
    "alpha": ({"lora_alpha": "x"}, {}, AdapterFileInvalid, "lora_alpha is x"),
    "no rank": ({"r": None}, {}, AdapterFileInvalid, "r is None"),
    "pattern": (
        {"alpha_pattern": {"(a+)+$": 1}},
        {},
        AdapterFileInvalid,
        "more than the name of a module",
    ),
    "tokens": ({"alora_invocation_tokens": [-1]}, {}, AdapterFileInvalid, "no list of tokens"),
    "lone half": ({}, {f"{QUERY}.lora_B.weight": None}, AdapterFileInvalid, "has no lora_B"),
    "other tensor": ({}, {"x.weight": np.ones(1, np.float32)}, AdapterFileInvalid, "no half"),
    "module": ({}, halves(f"{HEAD}.strange", 4, 4), AdapterMismatch, "no such module"),
    "layer": (
        {},
        halves("base_model.model.model.layers.7.mlp.down_proj", 16, 24),
        AdapterMismatch,
        "no such module",
    ),
    "shape": ({}, halves(QUERY, 16, 24), AdapterMismatch, "lora_a: expected 4x16, found 4x24"),
    "rank": ({}, halves(QUERY, 16, 16, rank=17), RankTooLarge, "rank 17"),
    "not finite": (
        {},
        {f"{QUERY}.lora_A.weight": np.full((4, 16), np.inf, np.float32)},
        AdapterFileInvalid,
        "not finite",
    ),
}


@pytest.mark.parametrize(("config", "changes", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(
    tmp_path: Path,
    config: dict[str, Any],
    changes: dict[str, Any],
    kind: type[EngineError],
    message: str,
) -> None:
    tensors = halves(QUERY, 16, 16) | changes
    present = {name: values for name, values in tensors.items() if values is not None}
    folder = write_peft(tmp_path / "a", present, config)
    with pytest.raises(kind) as refusal:
        read_adapter(folder, QWEN, 16)
    assert message in str(refusal.value)


EXPERTS = "blk.0.ffn_up_exps.weight"
MOE = TargetModel("qwen3moe", 40, {EXPERTS: (3, 24, 16)}, num_layers=1)


def expert(number: int, rank: int = 4) -> dict[str, Any]:
    return halves(f"{HEAD}.mlp.experts.{number}.up_proj", 24, 16, rank)


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        (MOE, "mlp.experts.{}.up_proj"),
        (replace(MOE, architecture="llama"), "block_sparse_moe.experts.{}.w3"),
    ],
)
def test_modules_of_experts_become_a_stack(tmp_path: Path, model: TargetModel, stem: str) -> None:
    names = [f"{HEAD}.{stem.format(number)}" for number in range(3)]
    tensors: dict[str, Any] = {}
    for name in reversed(names):
        tensors |= halves(name, 24, 16)
        tensors[f"{name}.lora_A.weight"] += len(tensors)
    pair = read_adapter(write_peft(tmp_path / "a", tensors), model, 16).pairs[EXPERTS]
    for number, name in enumerate(names):
        np.testing.assert_array_equal(pair.down[number], tensors[f"{name}.lora_A.weight"])
        np.testing.assert_array_equal(pair.up[number], tensors[f"{name}.lora_B.weight"].T)
    assert (pair.rank, pair.factor) == (4, 2.0)


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "message"),
    [
        (expert(0) | expert(2), {}, AdapterFileInvalid, f"{EXPERTS} has no pair of expert 1 of 3"),
        (
            expert(0) | expert(1) | expert(2) | expert(3),
            {},
            AdapterMismatch,
            "expected experts 0 to 2, found expert 3",
        ),
        (
            expert(0) | expert(1) | expert(2, rank=5),
            {},
            AdapterMismatch,
            "experts.2.up_proj.lora_A.weight: expected 4x16, found 5x16",
        ),
        (
            expert(0) | expert(1) | expert(2),
            {"alpha_pattern": {"1.up_proj": 2}},
            AdapterFileInvalid,
            "differ in alpha",
        ),
        (
            halves(f"{HEAD}.mlp.experts.9999999.up_proj", 24, 16),
            {},
            AdapterMismatch,
            "no such module",
        ),
        (halves(f"{HEAD}.mlp.experts.up_proj", 24, 16), {}, AdapterFileInvalid, "expert 1 of 3"),
    ],
)
def test_experts_that_do_not_make_a_stack(
    tmp_path: Path,
    tensors: dict[str, Any],
    config: dict[str, Any],
    kind: type[EngineError],
    message: str,
) -> None:
    with pytest.raises(kind) as refusal:
        read_adapter(write_peft(tmp_path / "a", tensors, config), MOE, 16)
    assert message in str(refusal.value)


def test_two_tensors_for_one_half(tmp_path: Path) -> None:
    tensors = halves(QUERY, 16, 16)
    tensors[f"{QUERY}.lora_A"] = tensors[f"{QUERY}.lora_A.weight"]
    with pytest.raises(AdapterFileInvalid, match="has two lora_A"):
        read_adapter(write_peft(tmp_path / "a", tensors), QWEN, 16)


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(AdapterFileNotFound, match=r"a/adapter_config\.json"):
        read_adapter(tmp_path / "a", QWEN, 16)
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterFileNotFound, match=r"a/adapter_model\.safetensors"):
        read_adapter(tmp_path / "a", QWEN, 16)


def head(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DAMAGED = {
    "empty": (b"", "the file is empty"),
    "short": (b"abc", "has no head"),
    "long head": (struct.pack("<Q", 2**63) + b"{}", "a head of 9223372036854775808 bytes"),
    "no JSON": (struct.pack("<Q", 2) + b"{]", "no JSON"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, "no JSON"),
    "a list": (head([1]), "no object"),
    "type": (head({"a": ENTRY | {"dtype": "I64"}}), "type 'I64'"),
    "past the end": (head({"a": ENTRY}), "ends after the file"),
    "length": (head({"a": ENTRY | {"data_offsets": [0, 8]}}) + bytes(8), "a bad length"),
    "negative": (head({"a": ENTRY | {"shape": [-1]}}), "a bad shape"),
    "huge": (head({"a": ENTRY | {"shape": [2**47, 2**47, 2**47]}}), "a bad length"),
    "boolean": (head({"a": ENTRY | {"shape": [True]}}) + bytes(4), "a bad shape"),
    "no entry": (head({"a": 7}), "type 'None'"),
    "trailing": (head({"a": ENTRY}) + bytes(5), "has 1 bytes behind its tensors"),
    "a hole": (
        head({"a": ENTRY | {"data_offsets": [4, 8]}}) + bytes(8),
        "tensor 'a' begins behind a hole",
    ),
    "overlap": (
        head({"a": ENTRY, "b": ENTRY | {"shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
        "tensor 'b' overlaps another",
    ),
    "twice": (
        struct.pack("<Q", 17) + b'{"a":{}, "a": {}}',
        "has a head with two entries of 'a'",
    ),
    "large": (
        struct.pack("<Q", 2**21 + 1) + b"[" + b"[]," * 699050 + b"[]]",
        "a head of 2097153 bytes",
    ),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_safetensors(tmp_path: Path, data: bytes, message: str) -> None:
    folder = write_peft(tmp_path / "a", halves(QUERY, 16, 16))
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(AdapterFileInvalid) as refusal:
        read_adapter(folder, QWEN, 16)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("what", ["a folder", "a fifo", "endless", "a loop", "forbidden"])
def test_files_that_are_none(tmp_path: Path, name: str, what: str) -> None:
    """Nothing waits for a writer, and nothing is read without an end."""
    folder = write_peft(tmp_path / "a", halves(QUERY, 16, 16))
    path = folder / name
    path.unlink()
    match what:
        case "a folder":
            path.mkdir()
        case "a fifo":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "a loop":
            path.symlink_to(path)
        case _:
            path.symlink_to("/proc/self/mem")
    with pytest.raises((AdapterFileInvalid, AdapterFileNotFound)) as refusal:
        read_adapter(folder, QWEN, 16)
    assert name in str(refusal.value)


def test_a_configuration_is_bounded(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", halves(QUERY, 16, 16))
    (folder / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(AdapterFileInvalid, match="is larger than 1048576 bytes"):
        read_adapter(folder, QWEN, 16)


def test_half_precision(tmp_path: Path) -> None:
    tensors = {name: values.astype(np.float16) for name, values in halves(QUERY, 16, 16).items()}
    content = read_adapter(write_peft(tmp_path / "a", tensors), QWEN, 16)
    pair = content.pairs["blk.0.attn_q.weight"]
    assert (pair.number, pair.down.dtype) == ("f16", np.float16)
    write_safetensors(tmp_path / "a" / "adapter_model.safetensors", tensors)

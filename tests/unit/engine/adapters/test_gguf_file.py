"""Adapters as llama.cpp writes them: what is read, and every way in which a file is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.adapters.content import as_float32
from engine.adapters.errors import (
    AdapterFileInvalid,
    AdapterFileNotFound,
    AdapterMismatch,
    EngineError,
    RankTooLarge,
)
from engine.adapters.fit import TargetModel
from engine.adapters.regular_file import RegularFile
from engine.adapters.source import read_adapter
from tests.adapters import TinyAdapter, adapter_pairs, write_adapter
from tests.ggufs import write_gguf

SHAPES = {
    "token_embd.weight": (40, 16),
    "output.weight": (40, 16),
    "blk.0.attn_q.weight": (16, 16),
    "blk.0.ffn_down.weight": (16, 24),
}
EXPERTS = "blk.0.ffn_up_exps.weight"
MODEL = TargetModel("llama", 40, SHAPES, num_layers=1, num_heads=2, num_kv_heads=1)
TARGETS = tuple(SHAPES)
QUERY = "blk.0.attn_q.weight"


def read(path: Path, max_rank: int = 16) -> Any:
    return read_adapter(path, MODEL, max_rank)


@pytest.mark.parametrize(
    ("ggml_type", "number", "tolerance"),
    [(Type.F32, "f32", 0), (Type.F16, "f16", 1e-3), (Type.BF16, "bf16", 1e-2)],
)
def test_pairs_keep_the_precision_of_the_file(
    tmp_path: Path, ggml_type: Type, number: str, tolerance: float
) -> None:
    adapter = TinyAdapter(ggml_type=ggml_type)
    content = read(write_adapter(tmp_path / "a.gguf", adapter, SHAPES, TARGETS))
    assert list(content.pairs) == sorted(TARGETS)
    for name, (a, b) in adapter_pairs(adapter, SHAPES, TARGETS).items():
        pair = content.pairs[name]
        assert (pair.number, pair.rank, pair.factor) == (number, 4, 2.0)
        np.testing.assert_allclose(as_float32(pair.down, number), a, rtol=tolerance, atol=0)
        np.testing.assert_allclose(as_float32(pair.up, number), b.T, rtol=tolerance, atol=0)


def test_quantised_adapters_become_f32(tmp_path: Path) -> None:
    shapes = {QUERY: (32, 64)}
    tensors: dict[str, Any] = {}
    from tests.ggufs import encode

    a = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    b = np.random.default_rng(1).standard_normal((32, 32), np.float32)
    for suffix, values in (("lora_a", a), ("lora_b", b)):
        tensors[f"{QUERY}.{suffix}"] = (encode(values, Type.Q8_0), Type.Q8_0)
    keys = {"general.type": "adapter", "adapter.type": "lora"}
    path = write_gguf(tmp_path / "q.gguf", keys, tensors)
    content = read_adapter(path, replace(MODEL, matrices=shapes), 32)
    pair = content.pairs[QUERY]
    assert pair.number == "f32"
    np.testing.assert_allclose(pair.down, a, atol=0.02)
    assert pair.factor == 1.0


def test_the_factor_is_of_each_tensor(tmp_path: Path) -> None:
    adapter = TinyAdapter(rank=4, ranks={QUERY: 8}, alpha=6.0)
    content = read(write_adapter(tmp_path / "a.gguf", adapter, SHAPES, TARGETS))
    assert content.pairs[QUERY].factor == 6 / 8
    assert content.pairs["output.weight"].factor == 6 / 4
    assert (content.facts.rank, content.facts.alpha) == (8, 6.0)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_no_alpha_is_a_factor_of_one(tmp_path: Path, alpha: float | None) -> None:
    path = write_adapter(tmp_path / "a.gguf", TinyAdapter(alpha=alpha), SHAPES, (QUERY,))
    assert read(path).pairs[QUERY].factor == 1.0


def test_facts_are_told(tmp_path: Path) -> None:
    keys = {
        "adapter.lora.task_name": "poem",
        "adapter.lora.prompt_prefix": "Write:",
        "adapter.alora.invocation_tokens": np.array([3, 4], np.uint32),
    }
    path = tmp_path / "a.gguf"
    _write_with_array(path, keys)
    content = read(path)
    assert (content.facts.task_name, content.facts.prompt_prefix) == ("poem", "Write:")
    assert content.facts.invocation_tokens == (3, 4)


def _write_with_array(path: Path, keys: dict[str, Any]) -> None:
    from gguf import GGUFValueType, GGUFWriter

    from tests.ggufs import close

    writer = GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            kind = GGUFValueType.UINT32 if value.dtype == np.uint32 else GGUFValueType.INT32
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=kind)
    for name, (a, b) in adapter_pairs(TinyAdapter(), SHAPES, (QUERY,)).items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    close(writer)


def test_the_digest_is_of_what_changes_results(tmp_path: Path) -> None:
    base = TinyAdapter()
    first = read(write_adapter(tmp_path / "a.gguf", base, SHAPES, TARGETS)).facts.digest
    renamed = replace(base, keys={"general.name": "other", "adapter.lora.task_name": "t"})
    assert read(write_adapter(tmp_path / "b.gguf", renamed, SHAPES, TARGETS)).facts.digest == first
    others = [
        read(write_adapter(tmp_path / "c.gguf", replace(base, seed=2), SHAPES, TARGETS)),
        read(write_adapter(tmp_path / "d.gguf", replace(base, alpha=9.0), SHAPES, TARGETS)),
        read(write_adapter(tmp_path / "e.gguf", base, SHAPES, TARGETS[:2])),
    ]
    assert len({first, *(other.facts.digest for other in others)}) == 4


def test_norms_are_ignored_as_by_the_peer(tmp_path: Path) -> None:
    path = _write(tmp_path, {"blk.0.attn_norm.weight": np.ones(16, np.float32)})
    assert list(read(path).pairs) == [QUERY]


def _write(
    folder: Path,
    tensors: dict[str, Any] | None = None,
    *,
    drop: tuple[str, ...] = (),
    **keys: Any,
) -> Path:
    """A sound adapter of one pair, changed: `tensors` are added or replaced, `drop` left out."""
    a, b = adapter_pairs(TinyAdapter(), SHAPES, (QUERY,))[QUERY]
    held: dict[str, Any] = {f"{QUERY}.lora_a": a, f"{QUERY}.lora_b": b} | (tensors or {})
    stored = {n: (v, Type.F32) for n, v in held.items() if n not in drop}
    given: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora"}
    given |= {key.replace("__", "."): value for key, value in keys.items()}
    present = {key: value for key, value in given.items() if value is not None}
    return write_gguf(folder / "bad.gguf", present, stored)


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


NAN = ones(4, 16)
NAN[2, 3] = np.nan

REFUSED: list[tuple[str, dict[str, Any], type[EngineError], str]] = [
    ("a model", {"general__type": "model"}, AdapterFileInvalid, "general.type is 'model'"),
    ("no type", {"general__type": None}, AdapterFileInvalid, "general.type is ''"),
    ("control vector", {"adapter__type": "cvec"}, AdapterFileInvalid, "adapter.type is 'cvec'"),
    (
        "lone half",
        {"drop": (f"{QUERY}.lora_b",)},
        AdapterFileInvalid,
        f"tensor '{QUERY}' has no lora_b half",
    ),
    (
        "suffix",
        {"tensors": {"blk.0.attn_q.weight": ones(2, 2)}},
        AdapterFileInvalid,
        f"tensor '{QUERY}' ends in neither .lora_a nor .lora_b",
    ),
    (
        "unknown weight",
        {
            "tensors": {
                "blk.9.attn_q.weight.lora_a": ones(4, 16),
                "blk.9.attn_q.weight.lora_b": ones(16, 4),
            }
        },
        AdapterMismatch,
        "blk.9.attn_q.weight: expected a weight of this llama model, found no such weight",
    ),
    (
        "input size",
        {"tensors": {f"{QUERY}.lora_a": ones(4, 24)}},
        AdapterMismatch,
        f"{QUERY}.lora_a: expected 4x16, found 4x24",
    ),
    (
        "output size",
        {"tensors": {f"{QUERY}.lora_b": ones(24, 4)}},
        AdapterMismatch,
        f"{QUERY}.lora_b: expected 16x4, found 24x4",
    ),
    (
        "ranks differ",
        {"tensors": {f"{QUERY}.lora_b": ones(16, 5)}},
        AdapterMismatch,
        f"{QUERY}.lora_a: expected 5x16, found 4x16",
    ),
    (
        "three dimensions",
        {"tensors": {f"{QUERY}.lora_a": ones(2, 4, 16), f"{QUERY}.lora_b": ones(2, 16, 4)}},
        AdapterMismatch,
        "expected 2 dimensions in each half, found 3 and 3 dimensions",
    ),
    (
        "rank",
        {"tensors": {f"{QUERY}.lora_a": ones(17, 16), f"{QUERY}.lora_b": ones(16, 17)}},
        RankTooLarge,
        f"{QUERY} has rank 17, the server takes 16 at most",
    ),
    (
        "not finite",
        {"tensors": {f"{QUERY}.lora_a": NAN}},
        AdapterFileInvalid,
        f"{QUERY}.lora_a has a value that is not finite",
    ),
    ("alpha", {"adapter__lora__alpha": float("nan")}, AdapterFileInvalid, "adapter.lora.alpha"),
    ("alpha type", {"adapter__lora__alpha": "8"}, AdapterFileInvalid, "adapter.lora.alpha"),
    ("a part", {"split__count": 2}, AdapterFileInvalid, "is one of 2 files"),
    (
        "empty",
        {"drop": (f"{QUERY}.lora_a", f"{QUERY}.lora_b")},
        AdapterFileInvalid,
        "has no pair",
    ),
]


@pytest.mark.parametrize(
    ("changes", "kind", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, Any], kind: type[EngineError], message: str
) -> None:
    path = _write(tmp_path, **changes)
    with pytest.raises(kind) as refusal:
        read(path)
    assert str(refusal.value).startswith("bad.gguf: ")
    assert message in str(refusal.value)


def test_stacks_of_experts(tmp_path: Path) -> None:
    shapes = {EXPERTS: (3, 24, 16)}
    path = write_adapter(tmp_path / "a.gguf", TinyAdapter(), shapes, (EXPERTS,))
    model = replace(MODEL, matrices=shapes)
    pair = read_adapter(path, model, 16).pairs[EXPERTS]
    a, b = adapter_pairs(TinyAdapter(), shapes, (EXPERTS,))[EXPERTS]
    np.testing.assert_array_equal(pair.down, a)
    np.testing.assert_array_equal(pair.up, b.swapaxes(1, 2))
    assert (pair.rank, pair.factor) == (4, 2.0)


@pytest.mark.parametrize(
    ("shape", "down", "up", "message"),
    [
        ((4, 24, 16), None, None, "lora_a: expected 4x4x16, found 3x4x16"),
        ((3, 24, 16), (2, 4, 16), None, "lora_a: expected 3x4x16, found 2x4x16"),
        ((3, 24, 16), None, (2, 24, 4), "lora_b: expected 3x24x4, found 2x24x4"),
        ((3, 24, 16), (4, 16), (24, 4), "expected 3 dimensions in each half, found 2 and 2"),
        ((24, 16), None, None, "expected 2 dimensions in each half, found 3 and 3"),
    ],
)
def test_stacks_that_do_not_fit(
    tmp_path: Path,
    shape: tuple[int, ...],
    down: tuple[int, ...] | None,
    up: tuple[int, ...] | None,
    message: str,
) -> None:
    halves = {
        f"{EXPERTS}.lora_a": ones(*(down or (3, 4, 16))),
        f"{EXPERTS}.lora_b": ones(*(up or (3, 24, 4))),
    }
    model = replace(MODEL, matrices={**SHAPES, EXPERTS: shape})
    with pytest.raises(AdapterMismatch, match=message):
        read_adapter(_write(tmp_path, halves), model, 16)


def test_experts_without_room_for_them(tmp_path: Path) -> None:
    shapes = {EXPERTS: (3, 24, 16)}
    path = write_adapter(tmp_path / "a.gguf", TinyAdapter(), shapes, (EXPERTS,))
    model = replace(MODEL, matrices=shapes, takes_experts=False)
    with pytest.raises(AdapterMismatch, match=f"{EXPERTS}: expected .*--lora-experts"):
        read_adapter(path, model, 16)


def test_another_architecture(tmp_path: Path) -> None:
    adapter = TinyAdapter(architecture="qwen3")
    path = write_adapter(tmp_path / "a.gguf", adapter, SHAPES, (QUERY,))
    with pytest.raises(AdapterMismatch) as refusal:
        read(path)
    assert refusal.value.metadata() == {
        "path": "a.gguf",
        "tensor": "general.architecture",
        "expected": "'llama'",
        "found": "'qwen3'",
    }


def test_a_file_that_is_cut_short_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere: of a mapping the process would end with SIGBUS."""
    path = write_adapter(tmp_path / "a.gguf", TinyAdapter(), SHAPES, TARGETS)
    data, whole = path.read_bytes(), RegularFile.read
    state = {"left": 0}

    def read_and_cut(file: RegularFile, start: int, length: int) -> Any:
        if state["left"] == 0:
            path.write_bytes(data[: start + length // 2])
        state["left"] -= 1
        return whole(file, start, length)

    monkeypatch.setattr(RegularFile, "read", read_and_cut)
    for number in range(1 + 2 * len(TARGETS)):
        path.write_bytes(data)
        state["left"] = number
        with pytest.raises(AdapterFileInvalid, match="was cut short while it was read"):
            read(path)
    path.write_bytes(data)
    assert list(read(path).pairs) == sorted(TARGETS)


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileNotFound, match=r"gone\.gguf"):
        read(tmp_path / "gone.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(AdapterFileInvalid, match=r"text.gguf"):
        read(tmp_path / "text.gguf")


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (np.array([3, 40], np.uint32), AdapterMismatch, "a vocabulary of 40, found token 40"),
        (np.array([3], np.int32), AdapterFileInvalid, "holds int32, not uint32"),
        (np.zeros(1025, np.uint32), AdapterFileInvalid, "1025 invocation tokens, at most 1024"),
    ],
)
def test_invocation_tokens(
    tmp_path: Path, tokens: Any, kind: type[EngineError], message: str
) -> None:
    path = tmp_path / "a.gguf"
    _write_with_array(path, {"adapter.alora.invocation_tokens": tokens})
    with pytest.raises(kind, match=message):
        read(path)

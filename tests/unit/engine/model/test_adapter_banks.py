"""Banks: what they take is what the planner says, and a place is written in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.content import AdapterContent, Pair, make_content
from engine.gguf.reader import GgufFile
from engine.model import adapter_banks
from engine.model.adapter_banks import AdapterBanks, adapted_shapes
from engine.model.architectures import read_spec
from engine.model.spec import ModelSpec
from tests.families import FAMILIES, write_family
from tests.ggufs import TinyLlama, write_llama

DOWN, EXPERTS = "blk.{}.attn_k.weight", "blk.{}.ffn_up_exps.weight"


@pytest.fixture(scope="module", name="dense")
def make_dense(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("dense") / "m.gguf"
    return spec_of(write_llama(path, TinyLlama(num_layers=5)))


@pytest.fixture(scope="module", name="moe")
def make_moe(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("moe") / "m.gguf"
    return spec_of(write_family(path, FAMILIES["qwen3moe"]))


def spec_of(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        return read_spec(file)


def open_banks(spec: ModelSpec, capacity: AdapterCapacity, *, is_native: bool) -> AdapterBanks:
    banks = AdapterBanks(spec, capacity, is_native=is_native)
    for compilation in banks.compilations():
        compilation()
    return banks


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("has_experts", [False, True])
def test_they_take_what_the_planner_counts(
    moe: ModelSpec, *, has_experts: bool, is_native: bool
) -> None:
    capacity = AdapterCapacity(count=2, rank=5, has_experts=has_experts)
    banks = AdapterBanks(moe, capacity, is_native=is_native)
    leaves = jax.tree.leaves(banks.arrays)
    assert sum(leaf.nbytes for leaf in leaves) == capacity.nbytes(adapted_shapes(moe).values())
    assert ("ffn_up_exps" in banks.arrays.runs[0]) is has_experts
    assert "ffn_gate_inp" in banks.arrays.runs[0]


def some_pairs(spec: ModelSpec, name: str, layers: Sequence[int]) -> AdapterContent:
    rng = np.random.default_rng(0)
    pairs: dict[str, Pair] = {}
    for layer in layers:
        *experts, rows, cols = adapted_shapes(spec)[name.format(layer)]
        down = rng.standard_normal((*experts, 3, cols), np.float32)
        up = rng.standard_normal((*experts, 3, rows), np.float32)
        pairs[name.format(layer)] = Pair(down, up, "f32", 0.5 + layer)
    return make_content(pairs)


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize(
    ("family", "name"), [("dense", DOWN), ("moe", EXPERTS)], ids=["dense", "moe"]
)
def test_a_place_is_written_a_few_layers_at_a_time(
    family: str,
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_native: bool,
) -> None:
    """Two layers a piece, in five or three layers: some are written twice. Only then it counts."""
    spec: ModelSpec = request.getfixturevalue(family)
    *experts, rows, cols = adapted_shapes(spec)[name.format(0)]
    count = int(np.prod(experts))
    piece_bytes = 2 * 4 * 8 * count * max(rows, cols)
    monkeypatch.setattr(adapter_banks, "_PIECE_BYTES", piece_bytes)
    capacity = AdapterCapacity(count=3, rank=8, has_experts=True)
    banks = open_banks(spec, capacity, is_native=is_native)
    layers = [0, 1, spec.num_layers - 1]
    content = some_pairs(spec, name, layers)
    own = name.split(".")[2]

    def bank() -> Any:
        return banks.arrays.runs[0][own]

    sizes: list[int] = []
    for size in banks.write(1, content):
        sizes.append(size)
        assert not np.asarray(bank().entries).any(), "it counts before all is there"
    assert max(sizes) <= piece_bytes
    assert len(sizes) > 2
    for layer in range(spec.num_layers):
        pair = content.pairs.get(name.format(layer))
        for values, half in ((bank().down, "down"), (bank().up, "up")):
            held = np.asarray(values).view(np.float32)[layer].reshape(3, count, -1)
            assert not held[[0, 2]].any(), "another place was touched"
            wanted = np.zeros_like(held[1])
            if pair is not None:
                flat = getattr(pair, half).reshape(count, -1)
                wanted[:, : flat.shape[1]] = flat
            np.testing.assert_array_equal(held[1], wanted)
        entries = np.asarray(bank().entries)[layer].reshape(3, count)
        factors = np.asarray(bank().factors)[layer].reshape(3, count)
        assert (entries[1] == (4 * 3 if pair else 0)).all()
        assert (factors[1] == (pair.factor if pair else 0)).all()
        assert not entries[[0, 2]].any()
    banks.clear(1)
    assert not np.asarray(bank().entries).any()

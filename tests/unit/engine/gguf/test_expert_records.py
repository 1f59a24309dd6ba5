"""Experts read one by one are what the arena holds of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelFileError
from engine.gguf.arena import build_arena
from engine.gguf.expert_records import ExpertRecords
from engine.gguf.layouts import BLOCK_BYTES
from engine.gguf.reader import GgufFile
from tests.ggufs import random_blocks, write_gguf

COUNT, ROWS, COLS = 3, 64, 256
LAYERS = [["a.gate", "a.down"], ["b.gate", "b.down"]]
TYPES = {"a.gate": Type.Q4_K, "a.down": Type.Q6_K, "b.gate": Type.MXFP4, "b.down": Type.BF16}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {n: (random_blocks(rng, t, (COUNT, ROWS, COLS)), t) for n, t in TYPES.items()}
    return write_gguf(tmp_path / "m.gguf", tensors=tensors)


@pytest.mark.parametrize("tiled", [False, True])
def test_a_record_holds_each_stacks_matrix_of_one_expert(path: Path, tiled: bool) -> None:
    with GgufFile.open(path) as file:
        arena = build_arena(file, list(TYPES), tiled=tiled)
        records = ExpertRecords(file, LAYERS, tiled=tiled)
    slot = np.full(records.num_blocks * BLOCK_BYTES, 0xEE, np.uint8)
    for layer, names in enumerate(LAYERS):
        for expert in range(COUNT):
            records.read(layer, expert, slot)
            for place, name in zip(records.matrices(layer), names, strict=True):
                whole = arena.matrices[name].member(expert)
                size = whole.stride_blocks
                start = place.codes_block * BLOCK_BYTES
                found = slot[start : start + size * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
                expected = arena.data[whole.codes_block : whole.codes_block + size]
                np.testing.assert_array_equal(found, expected, name)
    records.close()


def test_the_longest_layer_makes_the_slot(path: Path) -> None:
    with GgufFile.open(path) as file:
        records = ExpertRecords(file, LAYERS)
        arena = build_arena(file, list(TYPES))
    sizes = [sum(arena.matrices[name].stride_blocks for name in names) for names in LAYERS]
    assert records.num_blocks == max(sizes)
    records.close()


def test_a_file_that_was_changed_since_it_was_opened_is_refused(path: Path) -> None:
    with GgufFile.open(path) as file:
        path.write_bytes(path.read_bytes())
        with pytest.raises(ModelFileError, match=r"m\.gguf: was changed while it was being read"):
            ExpertRecords(file, LAYERS)


def test_a_file_that_was_cut_is_an_error_that_names_the_tensor(path: Path) -> None:
    with GgufFile.open(path) as file:
        records = ExpertRecords(file, LAYERS)
        last = max(file.tensors.values(), key=lambda info: info.offset)
    with path.open("r+b") as open_file:
        open_file.truncate(last.offset + 100)
    slot = np.zeros(records.num_blocks * BLOCK_BYTES, np.uint8)
    layer = next(i for i, names in enumerate(LAYERS) if last.name in names)
    with pytest.raises(ModelFileError, match=re.escape(f"ends inside tensor '{last.name}'")):
        records.read(layer, COUNT - 1, slot)
    records.close()


def test_a_value_that_is_not_finite_is_damage(tmp_path: Path) -> None:
    values = np.zeros((COUNT, ROWS, COLS), np.float32)
    values[1, 3, 7] = np.nan
    path = write_gguf(tmp_path / "n.gguf", tensors={"w": (values, Type.F32)})
    with GgufFile.open(path) as file:
        records = ExpertRecords(file, [["w"]])
    slot = np.zeros(records.num_blocks * BLOCK_BYTES, np.uint8)
    records.read(0, 0, slot)
    with pytest.raises(ModelFileError, match="'w' has a value or a block scale in rows 0 to 63"):
        records.read(0, 1, slot)
    records.close()

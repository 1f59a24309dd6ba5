"""The native encoder makes the bytes of numpy's, whatever the shape."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelFileError
from engine.gguf.arena import Matrix, fill_matrix, plan_matrix
from engine.gguf.expert_records import ExpertRecords
from engine.gguf.layouts import BLOCK_BYTES
from engine.gguf.reader import GgufFile
from engine.kernels.native.encode import RecordReader, fill
from engine.kernels.native.expert_cache import NativeExpertCache, ensure_experts
from engine.memory.expert_store import ExpertShape, ExpertStore
from tests.ggufs import random_blocks, write_gguf
from tests.native import requires_native

pytestmark = requires_native
FORMATS = [Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.MXFP4]
# Where the byte is whose bits make a scale not finite, and those bits; of MXFP4 253 is too large.
BAD = {Type.Q8_0: (1, 0x7C), Type.Q4_K: (3, 0x7C), Type.Q6_K: (209, 0xFC), Type.MXFP4: (0, 253)}
Bytes = npt.NDArray[np.uint8]


def planned(path: Path, kind: Type, rows: int, cols: int) -> tuple[Matrix, Bytes]:
    blocks = random_blocks(np.random.default_rng(rows + cols), kind, (1, rows, cols))
    write_gguf(path, tensors={"w": (blocks, kind)})
    with GgufFile.open(path) as file:
        matrix = replace(plan_matrix(file, "w", 1, tiled=True), count=1)
        return matrix, file.raw("w").copy()


def encode_both(matrix: Matrix, kind: Type, raw: Bytes) -> tuple[Bytes, Bytes]:
    # A block before and one behind, in which nothing may be written.
    shape = (matrix.stride_blocks + 2, BLOCK_BYTES)
    expected, found = np.full(shape, 0xEE, np.uint8), np.full(shape, 0xEE, np.uint8)
    for _ in fill_matrix(expected, matrix, kind, raw, "m.gguf"):
        pass
    fill(found, matrix, kind, raw, "m.gguf")
    return expected, found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(16, 256), (64, 768), (33, 512), (1, 256), (15, 2048)])
def test_the_bytes_are_those_of_numpy(kind: Type, rows: int, cols: int, tmp_path: Path) -> None:
    matrix, raw = planned(tmp_path / "m.gguf", kind, rows, cols)
    expected, found = encode_both(matrix, kind, raw)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_scale_that_is_not_finite_is_damage_with_its_row(kind: Type, tmp_path: Path) -> None:
    matrix, raw = planned(tmp_path / "m.gguf", kind, 40, 512)
    damaged = raw.reshape(40, -1, GGML_QUANT_SIZES[kind][1]).copy()
    place, bits = BAD[kind]
    damaged[37, 1, place] = bits
    target = np.zeros((matrix.stride_blocks + 2, BLOCK_BYTES), np.uint8)
    with pytest.raises(ModelFileError, match="'w' has a block scale in row 37 that is not finite"):
        fill(target, matrix, kind, damaged.reshape(-1), "m.gguf")


def test_other_formats_go_through_numpy(tmp_path: Path) -> None:
    matrix, raw = planned(tmp_path / "m.gguf", Type.Q5_K, 32, 256)
    expected, found = encode_both(matrix, Type.Q5_K, raw)
    np.testing.assert_array_equal(found, expected)


def opened(tmp_path: Path, kinds: list[Type], rows: int = 200) -> ExpertRecords:
    rng = np.random.default_rng(0)
    tensors = {
        f"w{i}": (random_blocks(rng, kind, (3, rows, 512)), kind) for i, kind in enumerate(kinds)
    }
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with GgufFile.open(path) as file:
        return ExpertRecords(file, [list(tensors)], tiled=True)


@pytest.mark.parametrize("kinds", [FORMATS, [Type.Q4_K, Type.F32]])
def test_a_record_read_at_once_has_the_bytes_of_one_read_by_numpy(
    kinds: list[Type], tmp_path: Path
) -> None:
    # So many rows that a matrix comes in several pieces.
    records = opened(tmp_path, kinds, rows=1000)
    reader = RecordReader(records, 1)
    shape = records.num_blocks * BLOCK_BYTES
    for expert in range(3):
        expected, found = np.full(shape, 0xEE, np.uint8), np.full(shape, 0xEE, np.uint8)
        records.read(0, expert, expected)
        reader.read(0, expert, 0, found)
        np.testing.assert_array_equal(found, expected)
    records.close()


def test_a_record_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    records = opened(tmp_path, [Type.Q8_0, Type.MXFP4])
    reader = RecordReader(records, 1)
    slot = np.zeros(records.num_blocks * BLOCK_BYTES, np.uint8)
    (info, _) = records.sources(0)[1]
    path = tmp_path / "m.gguf"
    content = bytearray(path.read_bytes())
    content[info.offset + 17 * 16 * 7] = 255
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="'w1' has a block scale in row 7 that is not finite"):
        reader.read(0, 0, 0, slot)
    reader.read(0, 1, 0, slot)
    os.truncate(path, info.offset + 10)
    with pytest.raises(ModelFileError, match="ends inside tensor 'w1'"):
        reader.read(0, 0, 0, slot)
    records.close()


def store_of(records: ExpertRecords) -> ExpertStore:
    reader = RecordReader(records, 1)
    assert reader.shares
    shape = ExpertShape(1, 3, top_k=1, slot_bytes=records.num_blocks * BLOCK_BYTES)
    store = ExpertStore(shape, reader.read, overlaps=False, reader_shares=True)
    store.take(np.zeros((3, shape.slot_bytes), np.uint8))
    return store


def brought(cache: NativeExpertCache, expert: int) -> int:
    """Has a step ask for an expert, which is read by the threads of that step."""
    ids = jnp.array([[expert]], jnp.int32)
    return int(ensure_experts(jnp.int32(cache.number), jnp.int32(0), ids)[0, 0])


def test_what_a_step_waits_for_is_read_by_all_its_threads(tmp_path: Path) -> None:
    records = opened(tmp_path, FORMATS, rows=1000)
    store = store_of(records)
    cache = NativeExpertCache(store)
    for expert in (2, 0, 1):
        expected = np.zeros(store.shape.slot_bytes, np.uint8)
        records.read(0, expert, expected)
        np.testing.assert_array_equal(store.slots[brought(cache, expert)], expected)
    cache.close()
    store.close()
    records.close()


def test_of_what_several_threads_find_wrong_the_first_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = opened(tmp_path, [Type.Q8_0, Type.MXFP4], rows=4000)
    (info, _) = records.sources(0)[1]
    path = tmp_path / "m.gguf"
    content = bytearray(path.read_bytes())
    for row in (7, 2000, 3999):
        content[info.offset + 17 * 16 * row] = 255
    path.write_bytes(content)
    store = store_of(records)
    cache = NativeExpertCache(store)
    with pytest.raises(ValueError, match="experts could not be loaded"):
        brought(cache, 0)
    assert "'w1' has a block scale in row 7 that is not finite" in caplog.text
    assert store.used == 0
    # The next one is whole.
    assert store.slot_of[0, 1] < 0
    assert brought(cache, 1) == store.slot_of[0, 1]
    cache.close()
    store.close()
    records.close()

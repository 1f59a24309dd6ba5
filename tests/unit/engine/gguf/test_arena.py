from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.errors import ModelFileError, UnsupportedModel
from engine.gguf import arena as arena_module
from engine.gguf.arena import Arena, build_arena, plan_arena, read_arrays
from engine.gguf.layouts import layout_for
from engine.gguf.reader import GgufFile
from tests.ggufs import random_blocks, write_gguf
from tests.unit.engine.gguf.planes import decode_matrix

TYPES = [t for t in Type if layout_for(t) is not None]
ROWS, COLS = 37, 256


@pytest.fixture
def every_type(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    tensors = {t.name: (random_blocks(rng, t, (ROWS, COLS)), t) for t in TYPES}
    return write_gguf(tmp_path / "types.gguf", tensors=tensors)


def test_every_type_decodes_to_its_reference_after_loading(
    every_type: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of a few rows, so that most matrices take several.
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", 2000)
    with GgufFile.open(every_type) as file:
        arena = build_arena(file, [t.name for t in TYPES])
        for t in TYPES:
            raw = file.raw(t.name).reshape(ROWS, -1)
            values = decode_matrix(arena, t.name)
            np.testing.assert_array_equal(values[:ROWS], quants.dequantize(raw, t), err_msg=t.name)
            assert not values[ROWS:].any(), f"{t.name}: padding rows are zero"


def test_planes_follow_each_other_in_one_aligned_array(every_type: Path) -> None:
    with GgufFile.open(every_type) as file:
        arena = build_arena(file, ["Q4_1", "Q6_K", "BF16"])
    assert arena.data.dtype == np.uint8
    assert arena.data.shape[1] == 64
    assert arena.data.flags.c_contiguous
    assert arena.data.ctypes.data % 64 == 0
    places = [
        (matrix.codes_block, matrix.scales_block, matrix.offsets_block)
        for matrix in arena.matrices.values()
    ]
    # 64 rows of 256: Q4_1 has 128 blocks of codes, 16 of scales, 16 of offsets; Q6_K has 256 of
    # codes and 64 of scales; BF16 has 512.
    assert places == [(0, 128, 144), (160, 416, None), (480, None, None)]
    assert len(arena.data) == 992


@pytest.mark.parametrize("ggml_type", [Type.Q4_1, Type.Q6_K, Type.MXFP4, Type.F16])
def test_each_matrix_of_a_stack_lies_a_stride_behind_the_one_before(
    tmp_path: Path, ggml_type: Type
) -> None:
    raw = random_blocks(np.random.default_rng(3), ggml_type, (5, ROWS, COLS))
    path = write_gguf(tmp_path / "m.gguf", tensors={"w": (raw, ggml_type)})
    with GgufFile.open(path) as file:
        arena = build_arena(file, ["w"])
    stack = arena.matrices["w"]
    assert (stack.count, stack.rows, stack.cols) == (5, ROWS, COLS)
    assert len(arena.data) == 5 * stack.stride_blocks
    for index in range(5):
        one = Arena(arena.data, {"w": stack.member(index)})
        expected = quants.dequantize(raw[index], ggml_type)
        np.testing.assert_array_equal(decode_matrix(one, "w")[:ROWS], expected)


def test_the_plan_is_what_gets_built(every_type: Path) -> None:
    names = ["Q8_0", "Q4_K", "F16"]
    with GgufFile.open(every_type) as file:
        plan = plan_arena(file, names)
        arena = build_arena(file, names)
    assert dict(plan.matrices) == dict(arena.matrices)
    assert plan.nbytes == arena.data.nbytes


def test_progress_counts_every_byte_once(every_type: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", 2000)
    calls: list[tuple[int, int]] = []
    with GgufFile.open(every_type) as file:
        build_arena(file, ["Q8_0", "Q4_0"], lambda done, total: calls.append((done, total)))
    total = ROWS * (COLS // 32) * (34 + 18)
    assert {call[1] for call in calls} == {total}
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert done[-1] == total
    assert len(done) == 3 + 3  # 16 rows at a time, whole tiles, however long a row is.


def test_an_empty_arena_is_an_array(every_type: Path) -> None:
    with GgufFile.open(every_type) as file:
        assert build_arena(file, []).data.shape == (0, 64)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("hypercube", "tensor 'hypercube' has shape (2, 2, 3, 32), expected (rows, columns) or a"),
        ("line", "tensor 'line' has shape (32,), expected (rows, columns)"),
        ("ints", "tensor 'ints' has type I32, which no layout holds"),
    ],
)
def test_what_is_no_matrix_is_refused_by_name(tmp_path: Path, name: str, detail: str) -> None:
    tensors = {
        "hypercube": (np.zeros((2, 2, 3, 32), np.float32), Type.F32),
        "line": (np.zeros(32, np.float32), Type.F32),
        "ints": (np.zeros((2, 32), np.int32), Type.I32),
    }
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    refusal = pytest.raises(UnsupportedModel, match=re.escape(detail))
    with GgufFile.open(path) as file, refusal:
        build_arena(file, [name])


def test_a_missing_tensor_is_named(every_type: Path) -> None:
    with GgufFile.open(every_type) as file:
        for read in (plan_arena, build_arena, read_arrays):
            with pytest.raises(ModelFileError, match=r"types\.gguf: tensor 'nope' is missing"):
                read(file, ["nope"])


# Every byte is a finite scale in these two.
WITH_FLOATS = [t for t in TYPES if t not in (Type.NVFP4, Type.MXFP4)]


@pytest.mark.parametrize("ggml_type", WITH_FLOATS, ids=lambda t: t.name)
def test_a_scale_or_value_that_is_not_finite_refuses_the_tensor(
    tmp_path: Path, ggml_type: Type
) -> None:
    raw = random_blocks(np.random.default_rng(3), ggml_type, (3, 256))
    # Wherever a float lies, it becomes NaN (F32, F16 and BF16 alike).
    raw[1] = 0xFF
    path = write_gguf(tmp_path / "m.gguf", tensors={"w": (raw, ggml_type)})
    refusal = pytest.raises(ModelFileError, match=r"'w' .* in rows 0 to 2 that is not finite")
    with GgufFile.open(path) as file, refusal:
        build_arena(file, ["w"])


def test_memory_that_is_out_is_a_refusal(every_type: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    with GgufFile.open(every_type) as file:
        monkeypatch.setattr(arena_module.np, "zeros", refuse)
        with pytest.raises(UnsupportedModel, match="its weights need 12288 bytes"):
            build_arena(file, ["Q4_K"])


def test_vectors_are_float32_whatever_their_type(tmp_path: Path) -> None:
    values = np.linspace(-2, 2, 64, dtype=np.float32)
    tensors = {
        "f32": (values, Type.F32),
        "f16": (values.astype(np.float16), Type.F16),
        "q8": (quants.quantize(values, Type.Q8_0), Type.Q8_0),
    }
    with GgufFile.open(write_gguf(tmp_path / "v.gguf", tensors=tensors)) as file:
        vectors = read_arrays(file, ["q8", "f32", "f16"])
    assert list(vectors) == ["q8", "f32", "f16"]
    assert {vector.dtype for vector in vectors.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(vectors["f32"], values)
    np.testing.assert_array_equal(vectors["f16"], values.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(
        vectors["q8"], quants.dequantize(quants.quantize(values, Type.Q8_0), Type.Q8_0)
    )


def test_small_arrays_keep_their_shape(tmp_path: Path) -> None:
    filters = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write_gguf(tmp_path / "v.gguf", tensors={"filters": (filters, Type.F32)})
    with GgufFile.open(path) as file:
        np.testing.assert_array_equal(read_arrays(file, ["filters"])["filters"], filters)


def test_what_is_no_float_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"ints": (np.zeros(32, np.int32), Type.I32)}
    path = write_gguf(tmp_path / "v.gguf", tensors=tensors)
    refusal = pytest.raises(UnsupportedModel, match="tensor 'ints' has type I32")
    with GgufFile.open(path) as file, refusal:
        read_arrays(file, ["ints"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_leaves_nothing_of_the_file_resident(tmp_path: Path) -> None:
    raw = random_blocks(np.random.default_rng(0), Type.Q4_1, (4096, 4096))
    path = write_gguf(tmp_path / "big.gguf", tensors={"w": (raw, Type.Q4_1)})
    with GgufFile.open(path) as file:
        arena = build_arena(file, ["w"])
        resident = _resident_bytes(path)
    assert arena.data.nbytes >= raw.nbytes
    assert resident < 1 << 20, f"{resident} of {raw.nbytes} bytes are still mapped in"


def _resident_bytes(path: Path) -> int:
    found = 0
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found

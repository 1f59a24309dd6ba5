from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants

from engine.errors import ModelFileError, UnsupportedModel
from engine.gguf.arena import Progress
from engine.gguf.reader import GgufFile
from engine.kernels.qmatmul import MatrixStack, gather_rows
from engine.model import weights as weights_module
from engine.model.architectures import read_spec
from engine.model.tensors import check_tensors, expected_shapes
from engine.model.weights import Weights, load_weights
from tests.ggufs import (
    FloatArray,
    TinyLlama,
    add_llama_keys,
    close,
    encode,
    llama_tensors,
    spm_tokenizer,
)

MODEL = TinyLlama(num_layers=2, has_rope_freqs=True, ggml_type=Type.Q8_0)


def write(folder: Path, changes: dict[str, FloatArray | None], model: TinyLlama = MODEL) -> Path:
    """The tiny model with tensors added, replaced (float32) or, by None, left out."""
    tensors = llama_tensors(model, spm_tokenizer())
    for name, values in changes.items():
        tensors.pop(name, None)
        if values is not None:
            tensors[name] = values, Type.F32
    writer = GGUFWriter(folder / "m.gguf", "llama")
    add_llama_keys(writer, model)
    for name, (values, ggml_type) in tensors.items():
        writer.add_tensor(name, encode(values, ggml_type), raw_dtype=ggml_type)
    close(writer)
    return folder / "m.gguf"


def load(path: Path, progress: Progress | None = None) -> Weights:
    with GgufFile.open(path) as file:
        return load_weights(read_spec(file), file, progress)


def zeros(*shape: int) -> FloatArray:
    return np.zeros(shape, np.float32)


def test_every_tensor_is_where_the_decoder_looks_for_it(tmp_path: Path) -> None:
    weights = load(write(tmp_path, {}))
    tensors = llama_tensors(MODEL, spm_tokenizer())

    def rows_of(matrix: MatrixStack) -> npt.NDArray[np.float32]:
        return np.asarray(gather_rows(weights.arena, matrix, np.arange(matrix.rows)))  # pyright: ignore[reportArgumentType] -- numpy will do

    def stored(name: str) -> npt.NDArray[np.float32]:
        return quants.dequantize(encode(tensors[name][0], Type.Q8_0), Type.Q8_0)

    (run,) = weights.runs
    for name, array in run.items():
        for layer in range(MODEL.num_layers):
            if isinstance(array, MatrixStack):
                own = cast(MatrixStack, jax.tree.map(operator.itemgetter(layer), array))
                np.testing.assert_array_equal(rows_of(own), stored(f"blk.{layer}.{name}.weight"))
            else:
                np.testing.assert_array_equal(array[layer], tensors[f"blk.{layer}.{name}"][0])
    for name, array in weights.globals.items():
        if isinstance(array, MatrixStack):
            np.testing.assert_array_equal(rows_of(array), stored(f"{name}.weight"))
        else:
            np.testing.assert_array_equal(np.asarray(array), tensors[name][0])
    num_found = MODEL.num_layers * len(run) + len(weights.globals)
    assert num_found == len(tensors)


def test_the_arena_is_not_copied_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("other devices have memory of their own")
    addresses: list[int] = []
    build_arena = weights_module.build_arena

    def build(*arguments: Any, **options: Any) -> Any:
        arena = build_arena(*arguments, **options)
        addresses.append(arena.data.ctypes.data)
        return arena

    monkeypatch.setattr(weights_module, "build_arena", build)
    weights = load(write(tmp_path, {}))
    assert [cast(Any, weights.arena).unsafe_buffer_pointer()] == addresses


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(write(tmp_path, {}), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


NAMES = [
    "token_embd.weight",
    "output_norm.weight",
    "blk.0.attn_norm.weight",
    "blk.1.attn_q.weight",
    "blk.1.ffn_down.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    message = re.escape(f"m.gguf: tensor {name} is missing")
    with pytest.raises(UnsupportedModel, match=message):
        load(write(tmp_path, {name: None}))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.attn_k.weight", (64, 64), "(64, 64), expected (32, 64)"),
        ("blk.1.ffn_up.weight", (96, 32), "(96, 32), expected (96, 64)"),
        ("blk.1.ffn_norm.weight", (32,), "(32,), expected (64,)"),
        ("output.weight", (5, 64), f"(5, 64), expected ({len(spm_tokenizer().tokens)}, 64)"),
        ("rope_freqs.weight", (16,), "(16,), expected (8,)"),
        ("output_norm.weight", (1, 64), "(1, 64), expected (64,)"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(f"tensor {name} has shape {expected}")):
        load(write(tmp_path, {name: zeros(*shape)}))


@pytest.mark.parametrize(
    "name", ["blk.2.attn_q.weight", "blk.0.attn_sinks.weight", "blk.1.attn_q.bias", "cls.weight"]
)
def test_a_tensor_that_would_be_ignored_is_named(tmp_path: Path, name: str) -> None:
    message = re.escape(f"tensor {name} is not part of a llama model")
    with pytest.raises(UnsupportedModel, match=message):
        load(write(tmp_path, {name: zeros(64)}))


def test_a_bias_must_be_in_every_layer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.1\.attn_q\.bias is missing"):
        load(write(tmp_path, {"blk.0.attn_q.bias": zeros(64)}))


@pytest.mark.parametrize(
    ("name", "shape", "value"),
    [
        ("blk.0.ffn_up.weight", (96, 64), np.nan),
        ("blk.1.ffn_norm.weight", (64,), np.nan),
        ("output_norm.weight", (64,), np.inf),
    ],
)
def test_weights_that_are_not_finite_are_damage(
    tmp_path: Path, name: str, shape: tuple[int, ...], value: float
) -> None:
    damaged = zeros(*shape)
    damaged.flat[3] = value
    with pytest.raises(ModelFileError, match=f"{re.escape(name)}.* not finite"):
        load(write(tmp_path, {name: damaged}))


def test_a_tied_head_has_no_output_matrix(tmp_path: Path) -> None:
    path = write(tmp_path, {}, TinyLlama(tied_head=True))
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        check_tensors(spec, file)
    assert "output.weight" not in expected_shapes(spec)
    assert "output" not in load(path).globals

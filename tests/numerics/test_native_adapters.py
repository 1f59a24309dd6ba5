"""Adapters on the native kernels: close to the definition, and no bit depends on who runs beside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type

from engine.step import RowLogits
from tests.ggufs import TinyLlama, write_llama
from tests.native import requires_native
from tests.numerics.test_adapters import (
    LLAMA_TARGETS,
    MAX_ROWS,
    SETS,
    TOLERANCE,
    Case,
    Set,
    follow,
    lane,
    open_case,
    prompt,
)
from tests.runners import decode, prefill, write_whole

pytestmark = requires_native

Bits = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("dense")
    path = write_llama(folder / "m.gguf", TinyLlama(num_layers=3))
    return open_case(path, folder, LLAMA_TARGETS, is_native=True)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("quantised")
    model = TinyLlama(width=64, hidden=128, ggml_type=Type.Q4_0)
    path = write_llama(folder / "m.gguf", model)
    return open_case(path, folder, LLAMA_TARGETS, is_native=True, kv_dtype="f16")


@pytest.mark.parametrize("name", SETS)
def test_an_adapter_is_what_it_adds_to_dense_weights(dense: Case, name: str) -> None:
    tokens, chosen = prompt(50), SETS[name]
    expected = dense.reference(chosen).logprobs(tokens)[39:]
    got = follow(dense.runner, tokens, chosen, num_prefill=40)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def bits(row: RowLogits) -> Bits:
    return row.full().view(np.int32).copy()


def alone(case: Case, tokens: list[int], chosen: Set) -> list[Bits]:
    sequence = lane(chosen, MAX_ROWS)
    rows = [prefill(case.runner, sequence, tokens, 32)]
    rows += [decode(case.runner, sequence.work([token]))[0] for token in (9, 11)]
    return [bits(row) for row in rows]


@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_all_sets_have_the_bits_that_they_have_alone(quantised: Case, first: int) -> None:
    """One row without an adapter: alone it ran in a program that knows none."""
    chosen = [*list(SETS.values())[1 + first : MAX_ROWS + first], ()]
    prompts = [prompt(20 + 7 * index, seed=index) for index in range(MAX_ROWS)]
    expected = [alone(quantised, *pair) for pair in zip(prompts, chosen, strict=True)]
    lanes = [lane(own, index, num_pages=8) for index, own in enumerate(chosen)]
    for sequence, tokens, own in zip(lanes, prompts, expected, strict=True):
        (row,) = [prefill(quantised.runner, sequence, tokens, 32)]
        np.testing.assert_array_equal(bits(row), own[0])
    for step, token in enumerate((9, 11), 1):
        rows = decode(quantised.runner, *(sequence.work([token]) for sequence in lanes))
        for row, own in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(bits(row), own[step])


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_the_size_of_the_chunks_changes_no_bit(quantised: Case, chunk: int) -> None:
    tokens, chosen = prompt(50), SETS["three"]
    whole = bits(prefill(quantised.runner, lane(chosen, 1), tokens, 32))
    parts = bits(prefill(quantised.runner, lane(chosen, 2), tokens, chunk))
    np.testing.assert_array_equal(parts, whole)


def test_the_place_of_an_adapter_changes_no_bit(quantised: Case) -> None:
    tokens = prompt(30)
    before = bits(prefill(quantised.runner, lane(((0, 0.5), (1, 1.0))), tokens, 32))
    first, second = quantised.contents[:2]
    write_whole(quantised.runner, 0, second)
    write_whole(quantised.runner, 1, first)
    moved = bits(prefill(quantised.runner, lane(((1, 0.5), (0, 1.0))), tokens, 32))
    write_whole(quantised.runner, 0, first)
    write_whole(quantised.runner, 1, second)
    np.testing.assert_array_equal(moved, before)

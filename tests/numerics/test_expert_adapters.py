"""Adapters of experts, on both paths: dense weights to which float64 added them, and solo runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import FAMILIES, TinyExperts, write_family
from tests.native import requires_native
from tests.numerics.test_adapters import (
    MAX_ROWS,
    SETS,
    TOLERANCE,
    Case,
    follow,
    lane,
    open_case,
    prompt,
)
from tests.numerics.test_native_adapters import alone, bits
from tests.runners import decode, logprobs, prefill

# Biases of stacks, a shared expert beside them, one stack for gate and up, and a dense layer.
MODELS = {
    "qwen3moe": FAMILIES["qwen3moe"],
    "gpt-oss": FAMILIES["gpt-oss"],
    "deepseek2": replace(
        FAMILIES["deepseek2"],
        experts=TinyExperts(used=3, num_dense=1, shared=1, is_fused=True),
        keys={},
    ),
}
TARGETS = (
    "attn_q",
    "attn_output",
    "ffn_gate_inp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_gate_up_exps",
    "ffn_down_exps",
    "ffn_down",
    "ffn_up_shexp",
)


def open_model(name: str, folder: Path, **options: Any) -> Case:
    path = write_family(folder / "m.gguf", MODELS[name])
    return open_case(path, folder, TARGETS, **options)


# All resident, and a layer and a half of experts in memory at a time.
@pytest.mark.parametrize(
    ("name", "is_native", "expert_slots"),
    [
        pytest.param("gpt-oss", False, None),
        pytest.param("deepseek2", False, 12),
        pytest.param("gpt-oss", True, 12, marks=requires_native),
        pytest.param("deepseek2", True, None, marks=requires_native),
        pytest.param("qwen3moe", True, None, marks=requires_native),
    ],
)
def test_each_expert_is_what_is_added_to_it(
    tmp_path: Path, name: str, is_native: bool, expert_slots: int | None
) -> None:
    case = open_model(name, tmp_path, is_native=is_native, expert_slots=expert_slots, max_rows=1)
    assert any(name.endswith("_exps.weight") for name in case.contents[2].pairs)
    tokens = prompt(60)
    for chosen in (SETS["one"], SETS["three"]):
        expected = case.reference(chosen).logprobs(tokens)[49:]
        got = follow(case.runner, tokens, chosen, num_prefill=50)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
        plain = case.reference(()).logprobs(tokens)[49:]
        assert np.abs(expected - plain).max() > 100 * TOLERANCE, "they change too little"


def test_rows_of_all_sets_in_one_step_are_each_as_alone_on_xla(tmp_path: Path) -> None:
    case = open_model("qwen3moe", tmp_path)
    chosen = [*list(SETS.values())[1:MAX_ROWS], ()]
    lanes = [lane(own, index) for index, own in enumerate(chosen)]
    prompts = [prompt(20 + index, seed=index) for index in range(MAX_ROWS)]
    for sequence, tokens in zip(lanes, prompts, strict=True):
        prefill(case.runner, sequence, tokens, 32)
    rows = decode(case.runner, *(sequence.work([9]) for sequence in lanes))
    for row, own, tokens in zip(rows, chosen, prompts, strict=True):
        expected = case.reference(own).logprobs([*tokens, 9])[-1]
        np.testing.assert_allclose(logprobs(row), expected, rtol=0, atol=TOLERANCE)


@requires_native
def test_rows_of_all_sets_have_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    case = open_model("qwen3moe", tmp_path, is_native=True, expert_slots=8)
    chosen = [*list(SETS.values())[3 : MAX_ROWS + 2], ()]
    prompts = [prompt(20 + 7 * index, seed=index) for index in range(MAX_ROWS)]
    expected = [alone(case, *pair) for pair in zip(prompts, chosen, strict=True)]
    lanes = [lane(own, index, num_pages=8) for index, own in enumerate(chosen)]
    for sequence, tokens, own in zip(lanes, prompts, expected, strict=True):
        row = prefill(case.runner, sequence, tokens, 5)
        np.testing.assert_array_equal(bits(row), own[0])
    for step, token in enumerate((9, 11), 1):
        rows = decode(case.runner, *(sequence.work([token]) for sequence in lanes))
        for row, own in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(bits(row), own[step])

"""The native kernels under the whole runner: close to the definition, and equal to themselves.

Dense weights meet the float64 reference. Quantised ones meet it only as far as 8-bit activations
do; what must hold of them is that no bit depends on the batch, the chunks or the page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type

from engine.runner import JaxRunner
from engine.step import RowLogits, StepBatch
from tests.ggufs import TinyLlama, write_llama
from tests.native import instruction_sets, instructions, requires_native
from tests.numerics.reference import ReferenceDecoder
from tests.numerics.test_decoder import (
    MIXED,
    MODELS,
    TOLERANCE,
    assert_close,
    follow,
    lane,
    prompt,
    write_mixed,
)
from tests.runners import Lane, decode, logprobs, open_runner, prefill

pytestmark = requires_native

Bits = npt.NDArray[np.int32]

PAGES = 6  # of 16 tokens, for a prompt of up to 90
PROMPTS = [prompt(count, seed=count) for count in (80, 1, 15, 16, 17, 33, 64, 65)]


def warm(path: Path, **options: int | str) -> JaxRunner:
    runner = open_runner(path, is_native=True, **options)  # pyright: ignore[reportArgumentType] -- each option keeps its own type
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout in one file: q4 and q8, groups of 16 and 32, f16 and f32, dense."""
    path = tmp_path_factory.mktemp("native") / "mixed.gguf"
    return write_mixed(path, MODELS["mixed-a"], MIXED["mixed-a"], biases=True)


@pytest.fixture(scope="module")
def runner(quantised: Path) -> JaxRunner:
    return warm(quantised, max_rows=8, kv_dtype="f16")


@pytest.mark.parametrize("ggml_type", [Type.F32, Type.F16, Type.BF16], ids=lambda t: t.name)
def test_dense_weights_have_the_logprobs_of_the_definition(tmp_path: Path, ggml_type: Type) -> None:
    path = write_llama(tmp_path / "m.gguf", TinyLlama(num_layers=3, ggml_type=ggml_type))
    tokens = prompt(60)
    followed = follow(warm(path), tokens, num_prefill=30)
    assert_close(followed, ReferenceDecoder(path).logprobs(tokens)[29:], TOLERANCE)


@pytest.mark.parametrize("name", MIXED)
def test_quantised_weights_stay_near_the_definition(name: str, tmp_path: Path) -> None:
    """Activations of 8 bits move a token's distribution a little: by nats, not by guesses."""
    path = write_mixed(tmp_path / "m.gguf", MODELS[name], MIXED[name], biases=name == "mixed-b")
    tokens = prompt(60)
    found = follow(warm(path), tokens, num_prefill=30)
    exact = ReferenceDecoder(path).logprobs(tokens)[29:]
    divergence = (np.exp(exact) * (exact - found)).sum(-1)
    assert divergence.min() > -1e-6
    assert divergence.mean() < 5e-3, f"{divergence.mean():.1e}"


def bits(row: RowLogits) -> Bits:
    return row.full().view(np.int32).copy()


def after_prompt(runner: JaxRunner, tokens: list[int], chunk: int, index: int = 0) -> list[Bits]:
    """Whole rows after the prompt and after two tokens more."""
    sequence = lane(index, num_pages=PAGES)
    rows = [prefill(runner, sequence, tokens, chunk)]
    rows += [decode(runner, sequence.work([token]))[0] for token in (9, 11)]
    return [bits(row) for row in rows]


def assert_same(found: Sequence[Bits], expected: Sequence[Bits], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, what)


def test_no_bit_depends_on_the_chunks(runner: JaxRunner) -> None:
    expected = after_prompt(runner, PROMPTS[0], 32)
    for chunk in (1, 3, 7, 16, 31):
        assert_same(after_prompt(runner, PROMPTS[0], chunk), expected, f"chunks of {chunk}")


def test_no_bit_depends_on_the_program_that_a_step_takes(quantised: Path) -> None:
    """Chunks of up to 32, 128 and 200 tokens and one or four rows are programs of their own."""
    tokens = prompt(200)
    wide = warm(quantised, max_rows=4, max_chunk=200, kv_dtype="f16", num_pages=60)
    expected = [bits(prefill(wide, lane(0, 14), tokens, 200))]
    for chunk in (1, 20, 32, 33, 128, 129):
        found = [bits(prefill(wide, lane(1, 14), tokens, chunk))]
        assert_same(found, expected, f"chunks of {chunk}")
    sequence = lane(2, 14)
    prefill(wide, sequence, tokens[:-1], 200)
    alone = decode(wide, sequence.work(tokens[-1:]))
    assert_same([bits(alone[0])], expected, "decoded")


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_no_bit_depends_on_whether_the_last_tokens_are_rows_of_one_step(
    runner: JaxRunner, count: int
) -> None:
    for tokens in (PROMPTS[0], PROMPTS[4], PROMPTS[2][:count]):
        expected = after_prompt(runner, tokens, 32)
        sequence = lane(1, num_pages=PAGES)
        if tokens[:-count]:
            prefill(runner, sequence, tokens[:-count], 32)
        works = sequence.work(tokens[-count:]).one_by_one()
        rows = decode(runner, *works)
        rows += [decode(runner, sequence.work([token]))[0] for token in (9, 11)]
        assert_same([bits(row) for row in rows], expected, f"{len(tokens)} tokens")


def test_no_bit_depends_on_the_lane(runner: JaxRunner) -> None:
    assert_same(
        after_prompt(runner, PROMPTS[0], 32, 5), after_prompt(runner, PROMPTS[0], 32), "lane"
    )


@pytest.mark.parametrize("count", [2, 3, 8])
def test_no_bit_depends_on_the_batch(runner: JaxRunner, count: int) -> None:
    alone = [after_prompt(runner, tokens, 32) for tokens in PROMPTS[:count]]
    lanes = [lane(index, num_pages=PAGES) for index in range(count)]
    for sequence, tokens in zip(lanes, PROMPTS, strict=False):
        prefill(runner, sequence, tokens, 32)
    for step, token in enumerate((9, 11), 1):
        rows = decode(runner, *(sequence.work([token]) for sequence in lanes))
        assert_same([bits(row) for row in rows], [rows[step] for rows in alone], f"{count} rows")


def test_no_bit_depends_on_a_chunk_in_the_same_step(runner: JaxRunner) -> None:
    alone = [after_prompt(runner, tokens, 32) for tokens in PROMPTS[:2]]
    first, second = lane(0, PAGES), lane(1, PAGES)
    prefill(runner, first, PROMPTS[0], 32)
    rows = runner.run(StepBatch((first.work([9]),), second.work(PROMPTS[1])))
    assert rows[0] is not None
    assert rows[1] is not None
    assert_same([bits(rows[0]), bits(rows[1])], [alone[0][1], alone[1][0]], "mixed step")


@pytest.mark.parametrize("page", [32, 64])
def test_no_bit_depends_on_the_page_size(quantised: Path, runner: JaxRunner, page: int) -> None:
    other = warm(quantised, page_tokens=page, kv_dtype="f16")
    sequence = Lane(range(1, 9))
    rows = [prefill(other, sequence, PROMPTS[0], 32)]
    rows += [decode(other, sequence.work([token]))[0] for token in (9, 11)]
    expected = after_prompt(runner, PROMPTS[0], 32)
    assert_same([bits(row) for row in rows], expected, f"pages of {page}")


def test_no_bit_depends_on_the_instruction_set(runner: JaxRunner) -> None:
    expected = after_prompt(runner, PROMPTS[0], 32)
    for name in instruction_sets():
        with instructions(name):
            assert_same(after_prompt(runner, PROMPTS[0], 32), expected, name)


def test_rows_have_logprobs(runner: JaxRunner) -> None:
    row = prefill(runner, lane(num_pages=PAGES), PROMPTS[0], 32)
    assert np.exp(logprobs(row)).sum() == pytest.approx(1, abs=1e-5)

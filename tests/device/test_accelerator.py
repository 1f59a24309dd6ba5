"""The whole runner on an accelerator, through XLA, against float64 and against itself.

An accelerator may sum in another order for another number of rows, so what must be equal is equal
within rounding, not to the bit.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt
import pytest

from engine.devices import choose_device
from engine.runner import JaxRunner
from engine.step import StepBatch
from engine.types import PoolKind
from tests.numerics.reference import ReferenceDecoder
from tests.numerics.test_adapters import LLAMA_TARGETS, MAX_ROWS, SETS, Case, open_case
from tests.numerics.test_adapters import lane as lane_of
from tests.numerics.test_decoder import (
    MIXED,
    MODELS,
    assert_close,
    follow,
    lane,
    prompt,
    write_mixed,
)
from tests.runners import decode, logprobs, open_runner, prefill

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="jax has no accelerator here"),
]

TOLERANCE = 1e-3
PAGES = 6
CHUNK = 32


@pytest.fixture(scope="module", autouse=True)
def accelerator() -> str:
    """Set up as the server does."""
    return choose_device("metal" if jax.default_backend() == "mps" else "gpu")


@pytest.fixture(scope="module", params=list(MIXED))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout in two files."""
    name: str = request.param
    path = tmp_path_factory.mktemp("device") / f"{name}.gguf"
    return write_mixed(path, MODELS[name], MIXED[name], biases=name == "mixed-a")


def test_every_token_has_the_logprobs_of_the_definition(model: Path) -> None:
    tokens = prompt(60)
    runner = open_runner(model)
    runner.warm_up()
    followed = follow(runner, tokens, num_prefill=30)
    assert_close(followed, ReferenceDecoder(model).logprobs(tokens)[29:], TOLERANCE)


def test_a_mixed_batch_is_what_each_row_is_alone(model: Path) -> None:
    runner = open_runner(model, max_rows=4)
    runner.warm_up()
    prompts = [prompt(count, seed=count) for count in (60, 1, 17, 33)]
    alone = [_after_prompt(runner, tokens) for tokens in prompts]
    lanes = [lane(index, PAGES) for index in range(4)]
    for sequence, tokens in zip(lanes[:3], prompts, strict=False):
        prefill(runner, sequence, tokens, CHUNK)
    works = tuple(sequence.work([9]) for sequence in lanes[:3])
    prefill(runner, lanes[3], prompts[3][:-8], CHUNK)
    rows = runner.run(StepBatch(works, lanes[3].work(prompts[3][-8:])))
    expected = [pair[1] for pair in alone[:3]] + [alone[3][0]]
    for row, own in zip(rows, expected, strict=True):
        assert row is not None
        np.testing.assert_allclose(logprobs(row), own, rtol=0, atol=TOLERANCE)


def test_a_slot_that_was_saved_goes_on_elsewhere(model: Path) -> None:
    runner = open_runner(model, max_rows=2, kv_dtype="f16")
    runner.warm_up()
    tokens = prompt(45)
    first, second = lane(0, PAGES), lane(1, PAGES)
    prefill(runner, first, tokens, CHUNK)
    saved = runner.read_pages(PoolKind.KV, first.pages).wait()
    runner.write_pages(PoolKind.KV, second.pages, saved)
    restored = runner.read_pages(PoolKind.KV, second.pages).wait()
    np.testing.assert_array_equal(restored.keys, saved.keys)
    np.testing.assert_array_equal(restored.values, saved.values)
    second.held = list(first.held)
    expected = logprobs(decode(runner, first.work([9]))[0])
    found = logprobs(decode(runner, second.work([9]))[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return open_case(model, tmp_path_factory.mktemp("adapters"), LLAMA_TARGETS)


def test_rows_of_several_adapter_sets_share_a_step(adapted: Case) -> None:
    chosen = list(SETS.values())[:MAX_ROWS]
    prompts = [prompt(20 + 7 * index, seed=index) for index in range(MAX_ROWS)]
    lanes = [lane_of(own, index, num_pages=8) for index, own in enumerate(chosen)]
    for sequence, tokens in zip(lanes, prompts, strict=True):
        prefill(adapted.runner, sequence, tokens, CHUNK)
    rows = decode(adapted.runner, *(sequence.work([9]) for sequence in lanes))
    for row, tokens, own in zip(rows, prompts, chosen, strict=True):
        expected = adapted.reference(own).logprobs([*tokens, 9])[-1]
        np.testing.assert_allclose(logprobs(row), expected, rtol=0, atol=TOLERANCE)


def _after_prompt(runner: JaxRunner, tokens: list[int]) -> list[npt.NDArray[np.float64]]:
    """Log-probabilities after a prompt, and after a token more."""
    sequence = lane(0, PAGES)
    rows = [prefill(runner, sequence, tokens, CHUNK), decode(runner, sequence.work([9]))[0]]
    return [logprobs(row) for row in rows]

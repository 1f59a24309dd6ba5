"""Every recurrent family against the float64 definition, on XLA and on the native kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.step import RowLogits, StepBatch
from tests.native import requires_native
from tests.numerics.recurrent_reference import RecurrentReference
from tests.recurrent_families import FAMILIES, VOCAB, write_recurrent
from tests.runners import Lane, decode, logprobs, open_runner, prefill

# Natural log-probabilities, everything in f32.
TOLERANCE = 1e-4
NUM_TOKENS, NUM_DECODED = 150, 4
PAGES = 10


def bits(row: RowLogits | None) -> npt.NDArray[np.int32]:
    assert row is not None
    return row.full().view(np.int32)


def lane(index: int) -> Lane:
    pages = range(1 + PAGES * index, 1 + PAGES * (index + 1))
    return Lane(pages, state_id=index + 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_steps_have_the_logprobs_of_the_definition(name: str, tmp_path: Path) -> None:
    path = write_recurrent(tmp_path / "m.gguf", name)
    runner = open_runner(path, max_rows=2, max_chunk=100)
    runner.warm_up()
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS).tolist()
    expected = RecurrentReference(path).logprobs(tokens)
    for index, chunk in enumerate((100, 33, 1)):
        sequence = lane(index)
        rows = [prefill(runner, sequence, tokens[:-NUM_DECODED], chunk)]
        rows += [decode(runner, sequence.work([token]))[0] for token in tokens[-NUM_DECODED:]]
        actual = np.stack([logprobs(row) for row in rows])
        np.testing.assert_allclose(
            actual, expected[-NUM_DECODED - 1 :], rtol=0, atol=TOLERANCE, err_msg=f"{chunk}"
        )


@requires_native
@pytest.mark.parametrize("name", FAMILIES)
def test_natively_no_bit_depends_on_chunks_or_on_the_batch(name: str, tmp_path: Path) -> None:
    path = write_recurrent(tmp_path / "m.gguf", name)
    runner = open_runner(path, max_rows=4, max_chunk=64, is_native=True)
    runner.warm_up()
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, NUM_TOKENS).tolist()
    exact = RecurrentReference(path).logprobs(tokens)[-1]

    lanes = [lane(index) for index in range(7)]
    first = prefill(runner, lanes[0], tokens, 64)
    np.testing.assert_allclose(logprobs(first), exact, rtol=0, atol=TOLERANCE)
    expected = bits(first)
    for sequence, chunk in ((lanes[1], 32), (lanes[2], 7), (lanes[3], 1)):
        np.testing.assert_array_equal(bits(prefill(runner, sequence, tokens, chunk)), expected)
    for sequence in lanes[4:7]:
        prefill(runner, sequence, tokens[:-1], 64)
    last = tokens[-1:]
    together = decode(runner, *(sequence.work(last) for sequence in lanes[4:6]))
    for row in together:
        np.testing.assert_array_equal(bits(row), expected, "decoded in a batch")
    lanes[0].held.clear()
    mixed = runner.run(StepBatch((lanes[6].work(last),), lanes[0].work(tokens[:40])))
    np.testing.assert_array_equal(bits(mixed[0]), expected, "decoded beside a chunk")


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen35"])
def test_a_state_that_is_copied_or_carried_over_the_host_goes_on(name: str, tmp_path: Path) -> None:
    runner = open_runner(write_recurrent(tmp_path / "m.gguf", name), max_chunk=32)
    runner.warm_up()
    compiled = runner.compiles
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, 30).tolist()
    sequence = lane(0)
    prefill(runner, sequence, tokens, 32)
    runner.copy_state(1, 5)
    content = runner.read_state(1).wait()
    expected = decode(runner, sequence.work([7]))[0].full()
    runner.write_state(6, content)
    for state_id in (5, 6):
        again = Lane(sequence.pages, list(tokens), state_id=state_id)
        np.testing.assert_array_equal(decode(runner, again.work([7]))[0].full(), expected)
    assert runner.compiles == compiled, "something compiled"
    with pytest.raises(ValueError, match="state 9 of 8"):
        runner.copy_state(1, 9)

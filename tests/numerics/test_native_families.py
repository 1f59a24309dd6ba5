"""Every family on the native kernels: the definition's numbers, and the same bits any way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.step import RowLogits, StepBatch
from tests.families import CONTEXT, VOCAB, write_family
from tests.native import requires_native
from tests.numerics.reference import ReferenceDecoder
from tests.numerics.test_families import CONTEXTS, MODELS, TOLERANCE
from tests.runners import Lane, decode, logprobs, open_runner, prefill

pytestmark = requires_native

NUM_TOKENS = 90
PAGES = 6


def bits(row: RowLogits | None) -> npt.NDArray[np.int32]:
    assert row is not None
    return row.full().view(np.int32)


def lane(index: int) -> Lane:
    return Lane(range(1 + PAGES * index, 1 + PAGES * (index + 1)))


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_the_same_bits_alone_in_a_batch_and_in_chunks(
    name: str, tmp_path: Path
) -> None:
    context = CONTEXTS.get(name, CONTEXT)
    path = write_family(tmp_path / "m.gguf", MODELS[name])
    # Four shapes of a step: 1 and 4 rows, 4 rows beside chunks of up to 32 and of up to 64.
    runner = open_runner(path, max_rows=4, max_chunk=64, context_tokens=context, is_native=True)
    runner.warm_up()
    count = min(NUM_TOKENS, context)
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, count).tolist()

    chunked = [prefill(runner, lane(0), tokens, chunk) for chunk in (64, 32, 7)]
    expected = bits(chunked[0])
    exact = ReferenceDecoder(path, context).logprobs(tokens)[-1]
    np.testing.assert_allclose(logprobs(chunked[0]), exact, rtol=0, atol=TOLERANCE)
    for row in chunked[1:]:
        np.testing.assert_array_equal(bits(row), expected, "in chunks")

    lanes = [lane(index) for index in range(4)]
    for sequence in lanes:
        prefill(runner, sequence, tokens[:-1], 64)
    last = tokens[-1:]
    alone = decode(runner, lanes[0].work(last))
    np.testing.assert_array_equal(bits(alone[0]), expected, "decoded alone")
    together = decode(runner, *(sequence.work(last) for sequence in lanes[1:3]))
    for row in together:
        np.testing.assert_array_equal(bits(row), expected, "decoded in a batch")
    mixed = runner.run(StepBatch((lanes[3].work(last),), lane(0).work(tokens[:40])))
    np.testing.assert_array_equal(bits(mixed[0]), expected, "decoded beside a chunk")

    prefill(runner, few := lane(1), tokens[:-4], 64)
    rows = runner.run(StepBatch(tuple(few.work(tokens[-4:]).one_by_one()), None))
    np.testing.assert_array_equal(bits(rows[-1]), expected, "as rows of one step")

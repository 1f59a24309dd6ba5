"""A prompt as rows of one token of one step is the prompt as a chunk: its logits and its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from engine.runner import JaxRunner
from engine.step import RowLogits, StepBatch
from engine.types import PoolKind
from tests.families import FAMILIES, VOCAB, WINDOW, write_family
from tests.native import requires_native
from tests.numerics.test_families import ORDER_TOLERANCE
from tests.runners import Lane, open_runner, prefill

PAGE, PAGES = 16, 6
# A prompt of its own, one that crosses a page, and what is left of one longer than the window.
HELD = [0, 14, 60]
NUM_SHORT = 4


@dataclass
class WindowedLane(Lane):
    """A sequence that has given back its pages behind the window."""

    def window_pages(self, start: int, end: int) -> Sequence[int]:
        behind = max(0, start - WINDOW + 1) // PAGE
        return [*[0] * behind, *self.pages[behind:]]


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


@dataclass(frozen=True)
class Case:
    runner: JaxRunner
    is_native: bool

    def held(self, index: int, tokens: Sequence[int]) -> Lane:
        """A sequence on pages of its own that holds some tokens."""
        sequence = WindowedLane(range(1 + PAGES * index, 1 + PAGES * (index + 1)))
        if tokens:
            prefill(self.runner, sequence, tokens, self.runner.max_chunk)
        return sequence

    def assert_same(
        self, found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
    ) -> None:
        """The native kernels have the same bits; XLA may add up in another order."""
        assert found.dtype == expected.dtype == np.float32
        if self.is_native:
            np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=ORDER_TOLERANCE)

    def assert_same_rows(
        self, found: Sequence[RowLogits | None], expected: Sequence[RowLogits | None]
    ) -> None:
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            self.assert_same(one.full(), other.full())

    def assert_same_pages(self, found: Lane, expected: Lane) -> None:
        assert found.held == expected.held
        for kind in (PoolKind.KV, PoolKind.SWA):
            if not self.runner.page_layout(kind).num_layers:
                continue
            for page in range(len(found.pages)):
                one, other = (
                    self.runner.read_pages(kind, [sequence.pages[page]]).wait()
                    for sequence in (found, expected)
                )
                written = max(0, min(PAGE, len(found.held) - page * PAGE))
                for name in ("keys", "values"):
                    a, b = (getattr(content, name)[:, :written] for content in (one, other))
                    self.assert_same(a, b)


@pytest.fixture(scope="module", params=["xla", pytest.param("native", marks=requires_native)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# Full attention, and layers with windows beside those with none.
@pytest.fixture(scope="module", params=["llama", "gemma3"])
def case(
    request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    path = write_family(tmp_path_factory.mktemp("short") / "m.gguf", FAMILIES[request.param])
    is_native = backend == "native"
    runner = open_runner(path, max_rows=16, page_tokens=PAGE, is_native=is_native)
    runner.warm_up()
    assert (runner.page_layout(PoolKind.SWA).num_layers > 0) == (request.param == "gemma3")
    return Case(runner, is_native)


@pytest.mark.parametrize("held", HELD)
def test_rows_of_one_token_are_the_chunk_of_them(case: Case, held: int) -> None:
    tokens = some_tokens(held + NUM_SHORT, seed=held)
    whole, short = (case.held(index, tokens[:held]) for index in range(2))
    expected = case.runner.run(StepBatch((), whole.work(tokens[held:])))
    works = short.work(tokens[held:]).one_by_one()
    found = case.runner.run(StepBatch(tuple(works), None))
    assert found[:-1] == [None] * (NUM_SHORT - 1)
    case.assert_same_rows(found[-1:], expected)
    case.assert_same_pages(short, whole)


def test_several_such_prompts_beside_a_decode_and_a_chunk_are_each_as_alone(case: Case) -> None:
    tokens = [some_tokens(held + NUM_SHORT, seed=held) for held in HELD]
    expected: list[RowLogits | None] = []
    whole: list[Lane] = []
    for index, (held, own) in enumerate(zip(HELD, tokens, strict=True)):
        whole.append(case.held(index, own[:held]))
        expected += case.runner.run(StepBatch((), whole[-1].work(own[held:])))
    other, long = some_tokens(41, seed=1), some_tokens(20, seed=2)
    expected += case.runner.run(StepBatch((case.held(3, other[:-1]).work(other[-1:]),), None))
    expected += case.runner.run(StepBatch((), case.held(4, ()).work(long)))

    short = [
        case.held(5 + index, own[:held])
        for index, (held, own) in enumerate(zip(HELD, tokens, strict=True))
    ]
    rows = [
        one
        for sequence, own in zip(short, tokens, strict=True)
        for one in sequence.work(own[-NUM_SHORT:]).one_by_one()
    ]
    decoded = case.held(8, other[:-1]).work(other[-1:])
    found = case.runner.run(StepBatch((*rows, decoded), case.held(9, ()).work(long)))
    case.assert_same_rows([row for row in found if row is not None], expected)
    for one, alone in zip(short, whole, strict=True):
        case.assert_same_pages(one, alone)

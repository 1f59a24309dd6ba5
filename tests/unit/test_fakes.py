"""The fake runner must notice the mistakes that the engine's tests rely on it to notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.step import (
    FloatArray,
    PageContent,
    PoolLost,
    RowLogits,
    SequenceWork,
    StepBatch,
)
from engine.types import PoolKind
from tests.fake_logits import hashed_logits, moved, tokens_of
from tests.fake_runner import FakeRunner
from tests.fake_text import FakeTokenizer, PlainText


def work(
    tokens: Sequence[int],
    pages: Sequence[int],
    start: int = 0,
    *,
    window_pages: Sequence[int] = (),
    wants_logits: bool = True,
) -> SequenceWork:
    return SequenceWork(tokens, start, pages, wants_logits, window_pages)


def run(runner: FakeRunner, *decodes: SequenceWork, chunk: SequenceWork | None = None) -> None:
    runner.run(StepBatch(decodes, chunk))


def test_logits_depend_on_what_lies_in_the_pages() -> None:
    runner = FakeRunner(4, page_tokens=2)
    (row,) = runner.run(StepBatch((), work([5, 6, 7], [3, 1])))
    assert row is not None
    assert np.array_equal(row.full(), hashed_logits([5, 6, 7], runner.vocab_size))
    # Another sequence writes over page 3: the first one's continuation changes.
    run(runner, work([9], [3]))
    (row,) = runner.run(StepBatch((work([8], [3, 1], start=3),), None))
    assert row is not None
    assert np.array_equal(row.full(), hashed_logits([9, 6, 7, 8], runner.vocab_size))


@pytest.mark.parametrize("pages", [[0], [-1], [5], []])
def test_a_page_that_does_not_exist_is_a_mistake(pages: list[int]) -> None:
    with pytest.raises(AssertionError):
        run(FakeRunner(4, page_tokens=2), work([5], pages))


def test_a_page_in_two_sequences_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="two sequences"):
        run(FakeRunner(4, page_tokens=2), work([5], [1]), work([6], [1]))


def test_decodes_may_be_consecutive_tokens_of_one_sequence() -> None:
    """They give what a chunk of them gives, beside other decodes and a chunk."""
    whole, rows = (FakeRunner(6, page_tokens=2, window=2, num_window_pages=6) for _ in range(2))
    tail = work([6, 7, 8], [3, 1], start=1, window_pages=[5, 4])
    other = work([9], [2], window_pages=[2])
    chunk = work([3, 4], [6], window_pages=[6])
    for runner in (whole, rows):
        run(runner, work([5], [3, 1], window_pages=[5, 4]))
    expected = whole.run(StepBatch((), tail))
    found = rows.run(
        StepBatch((other, *tail.one_by_one(), replace(other, pages=[4], window_pages=[3])), chunk)
    )
    assert [row is None for row in found] == [False, True, True, False, False, False]
    np.testing.assert_array_equal(_full(found[3]), _full(expected[0]))
    np.testing.assert_array_equal(_full(found[4]), _full(found[0]))
    np.testing.assert_array_equal(_full(found[0]), hashed_logits([9, 9], rows.vocab_size))
    np.testing.assert_array_equal(_full(found[5]), hashed_logits([3, 4, 3, 4], rows.vocab_size))


def _full(row: RowLogits | None) -> FloatArray:
    assert row is not None
    return row.full()


@pytest.mark.parametrize(
    "second",
    [
        work([6], [1], start=0),
        work([6], [1], start=2),
        work([6], [1, 2], start=1),
        replace(work([6], [1], start=1), adapters=[(0, 1.0)]),
    ],
    ids=["the same position", "a gap", "other pages", "another adapter"],
)
def test_rows_in_one_page_that_are_not_consecutive_tokens_are_a_mistake(
    second: SequenceWork,
) -> None:
    first = work([5], [1], wants_logits=False)
    with pytest.raises(AssertionError, match="two sequences"):
        run(FakeRunner(4, page_tokens=4), first, second)


def test_a_row_and_a_chunk_of_one_sequence_are_a_mistake() -> None:
    chunk = work([6, 7], [1], start=1)
    with pytest.raises(AssertionError, match="two sequences"):
        run(FakeRunner(4, page_tokens=4), work([5], [1], wants_logits=False), chunk=chunk)


def test_logits_inside_a_run_of_rows_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="before the last token"):
        run(FakeRunner(4, page_tokens=4), work([5], [1]), work([6], [1], start=1))


def test_several_rows_of_a_sequence_with_a_state_are_a_mistake() -> None:
    rows = replace(work([5, 6], [1]), state_id=1).one_by_one()
    with pytest.raises(AssertionError, match="no order"):
        run(FakeRunner(4, page_tokens=4, num_states=1), *rows)


def test_a_run_of_rows_with_a_hole_before_it_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="never written"):
        run(FakeRunner(4, page_tokens=4), *work([5, 6], [1], start=1).one_by_one())


def test_reading_what_was_never_written_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="never written"):
        run(FakeRunner(4, page_tokens=2), work([5], [1], start=1))


def test_a_failed_step_spoils_its_pages() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6], [1]))
    runner.fail_with = MemoryError()
    with pytest.raises(MemoryError):
        run(runner, work([7], [1, 2], start=1))
    with pytest.raises(AssertionError, match="never written"):
        run(runner, work([7], [1, 2], start=1))


def test_a_failed_step_leaves_the_pages_that_it_only_reads() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6], [1]))
    runner.fail_with = MemoryError()
    with pytest.raises(MemoryError):
        run(runner, work([7], [1, 2], start=2))
    run(runner, work([7], [1, 2], start=2))


def test_sequences_may_share_what_they_read() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6], [1]))
    run(runner, work([7], [1, 2], start=2), work([8], [1, 3], start=2))
    with pytest.raises(AssertionError, match="two sequences"):
        run(runner, work([7], [1, 2], start=3), work([8], [1, 2, 3], start=4))


def test_a_lost_pool_spoils_every_page() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6], [1]))
    runner.fail_with = PoolLost()
    with pytest.raises(PoolLost):
        run(runner, work([7], [2]))
    with pytest.raises(AssertionError, match="never written"):
        run(runner, work([7], [1, 2], start=2))


# A window of 3 tokens on pages of 2.


def windowed() -> FakeRunner:
    runner = FakeRunner(8, page_tokens=2, window=3, num_window_pages=8)
    run(runner, chunk=work([5, 6, 7, 8, 9], [1, 2, 3], window_pages=[4, 5, 6]))
    return runner


def test_logits_depend_on_the_window_too() -> None:
    runner = windowed()
    (row,) = runner.run(StepBatch((work([3], [1, 2, 3], 5, window_pages=[0, 5, 6]),), None))
    assert row is not None
    expected = hashed_logits([5, 6, 7, 8, 9, 3, 8, 9, 3], runner.vocab_size)
    assert np.array_equal(row.full(), expected)


def test_a_page_given_back_inside_the_window_is_a_mistake() -> None:
    # The token at position 5 sees positions 3 .. 5.
    with pytest.raises(AssertionError, match="inside the window was given back"):
        run(windowed(), work([3], [1, 2, 3], 5, window_pages=[0, 0, 6]))


@pytest.mark.parametrize("wants_logits", [True, False])
def test_a_wrong_window_table_is_a_mistake(wants_logits: bool) -> None:
    wrong = work([3, 3], [1, 2, 3, 4], 5, window_pages=[4, 4, 6, 7], wants_logits=wants_logits)
    with pytest.raises(AssertionError, match="in a sequence twice"):
        run(windowed(), chunk=wrong)
    wrong = work([3, 3], [1, 2, 3, 4], 5, window_pages=[5, 4, 6, 7], wants_logits=wants_logits)
    with pytest.raises(AssertionError, match="another sequence's tokens"):
        run(windowed(), chunk=wrong)
    wrong = work([3, 3], [1, 2, 3, 4], 5, window_pages=[0, 7, 6, 8], wants_logits=wants_logits)
    with pytest.raises(AssertionError, match="never written"):
        run(windowed(), chunk=wrong)


def test_window_pages_must_cover_the_tokens() -> None:
    with pytest.raises(AssertionError):
        run(windowed(), work([3], [1, 2, 3, 7], 6, window_pages=[4, 5, 6]))


def test_text_comes_back_whole() -> None:
    tokenizer = FakeTokenizer()
    tokens = tokenizer.encode("a€\n", add_special=True, parse_special=False)
    assert tokenizer.decode(tokens, render_special=False).decode() == "a€\n"
    text = PlainText(["\nx"])
    released = [text.push(tokenizer.piece(token)).text for token in tokens]
    assert released == ["", "a", "", "", "€", ""]
    assert text.unsent() == "\n"


def test_pages_are_zeros_on_the_host_until_they_were_copied() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6, 7], [3, 1]))
    read = runner.read_pages(PoolKind.KV, [3, 1])
    assert not read.host.keys.any()
    assert not read.host.values.any()
    run(runner, work([9], [3]))  # what was gathered is what the pages held then
    assert tokens_of(read.wait()).tolist() == [5, 6, 7, -1]


def test_pages_that_were_written_or_copied_can_be_gone_on_from() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6, 7], [3, 1]))
    content = runner.read_pages(PoolKind.KV, [3, 1]).wait()
    runner.write_pages(PoolKind.KV, [2, 4], PageContent(content.keys[:, :3], content.values[:, :3]))
    (row,) = runner.run(StepBatch((work([8], [2, 4], start=3),), None))
    assert row is not None
    assert np.array_equal(row.full(), hashed_logits([5, 6, 7, 8], runner.vocab_size))
    runner.copy_pages(PoolKind.KV, [4], [1])
    (row,) = runner.run(StepBatch((work([9], [3, 1, 2], start=4),), None))
    assert row is not None
    assert np.array_equal(row.full(), hashed_logits([5, 6, 7, 8, 9], runner.vocab_size))


def test_content_of_another_layer_is_a_mistake() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6], [3]))
    content = runner.read_pages(PoolKind.KV, [3]).wait()
    with pytest.raises(AssertionError, match="keys of no token"):
        runner.write_pages(PoolKind.KV, [1], PageContent(content.keys[::-1], content.values))
    with pytest.raises(AssertionError, match="values of no token"):
        runner.write_pages(PoolKind.KV, [1], PageContent(content.keys, content.values * 0))


def test_moved_tokens_are_others_than_those_that_were_evaluated_there() -> None:
    runner = FakeRunner(4, page_tokens=2)
    run(runner, chunk=work([5, 6, 7, 8], [3, 1]))
    runner.move_tokens([3, 1], [3, 2], 1, [2, 3])
    (row,) = runner.run(StepBatch((work([9], [3, 2], start=3),), None))
    assert row is not None
    assert np.array_equal(row.full(), hashed_logits([5, moved(7), moved(8), 9], runner.vocab_size))
    with pytest.raises(AssertionError):
        runner.move_tokens([3, 2], [3, 2], 2, [1])
    with pytest.raises(AssertionError, match="never written"):
        runner.move_tokens([4], [4], 0, [1])

"""The fake runner must notice the mistakes that the engine's tests rely on it to notice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.step import PageContent, PoolLost, SequenceWork, StepBatch
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

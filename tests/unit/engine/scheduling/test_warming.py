"""A prompt in a save: computed, saved, and the slot's once the file is in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import (
    DeadlineExceeded,
    EngineError,
    SlotBusy,
)
from engine.types import CancelCause, Cancelled
from tests.unit.engine.drive import B, solo
from tests.unit.engine.scheduling.saving import NAME, Transfers, ask_in, some_prompt


def test_a_prompt_is_computed_saved_and_stays(tmp_path: Path):
    it = Transfers(tmp_path)
    prompt = some_prompt(40)
    saved = it.wait(it.warm(ask_in("w", prompt)).done)
    assert saved.tokens == 40
    finished = it.drive.finished("w")
    assert (finished.prompt_tokens, finished.completion_tokens, finished.held_tokens) == (40, 0, 40)
    assert it.held(0) == 40
    it.drive.rest()
    other = Transfers(tmp_path)
    other.restore(0)
    for engine in (it, other):
        longer = (*prompt, B)
        assert engine.run(ask_in("x", longer)) == solo(longer, 5)
        assert engine.drive.started("x").cached_tokens == 40


def test_what_the_slot_held_stays_until_the_file_is_in_place(tmp_path: Path):
    it = Transfers(tmp_path)
    it.run(ask_in("a", some_prompt(30)))
    blocked = tmp_path / NAME
    blocked.mkdir()
    before = it.state()
    wish = it.warm(ask_in("w", some_prompt(40, 3)))
    with pytest.raises(EngineError, match="errno"):
        it.wait(wish.done)
    it.drive.rest()
    slots, _ = it.state()
    assert slots == before[0]
    longer = (*some_prompt(30), B)
    assert it.run(ask_in("b", longer)) == solo(longer, 5)
    assert it.drive.started("b").cached_tokens == 30


@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("window", [None, 8])
def test_a_prompt_that_is_cancelled_leaves_the_slot(
    tmp_path: Path, num_steps: int, window: int | None
):
    it = Transfers(tmp_path, window=window)
    it.run(ask_in("a", some_prompt(30)))
    slots, _ = it.state()
    wish = it.warm(ask_in("w", (*some_prompt(20), *some_prompt(40, 3))))
    it.drive.steps(num_steps)
    it.engine.cancel("w", CancelCause.CLIENT)
    it.settle()
    assert wish.done.cancelled() == isinstance(it.drive.end("w"), Cancelled)
    assert wish.done.done()
    if not (tmp_path / NAME).exists():
        assert it.state()[0] == slots
        longer = (*some_prompt(30), B)
        assert it.run(ask_in("b", longer)) == solo(longer, 5, window)
        assert it.drive.started("b").cached_tokens == 30


def test_a_prompt_continues_what_the_slot_holds(tmp_path: Path):
    it = Transfers(tmp_path)
    it.run(ask_in("a", some_prompt(30)))
    longer = (*some_prompt(30), *some_prompt(20, 5))
    it.wait(it.warm(ask_in("w", longer)).done)
    assert it.drive.started("w").cached_tokens == 30
    it.drive.rest()
    assert it.run(ask_in("b", (*longer, B))) == solo((*longer, B), 5)


def test_a_prompt_that_fits_only_alone_displaces_what_the_slot_held(tmp_path: Path):
    it = Transfers(tmp_path, kv_pages=16, num_slots=1)
    it.run(ask_in("a", some_prompt(30)))
    assert it.wait(it.warm(ask_in("w", some_prompt(50, 2))).done).tokens == 50
    it.drive.rest()
    assert it.held(0) == 50


def test_a_busy_slot_refuses_a_prompt_that_may_not_wait(tmp_path: Path):
    it = Transfers(tmp_path)
    it.engine.submit(ask_in("a", some_prompt(20), max_tokens=10))
    it.drive.steps(3)
    wish = it.warm(ask_in("w", some_prompt(9, 1)), fail_if_busy=True)
    it.drive.steps()
    assert isinstance(it.drive.error("w"), SlotBusy)
    assert wish.done.exception(0) is it.drive.error("w")
    it.drive.rest()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_prompt_that_fails_fails_its_save(tmp_path: Path, is_begun: bool):
    it = Transfers(tmp_path)
    if not is_begun:
        it.engine.submit(ask_in("a", some_prompt(20), max_tokens=10))
        it.drive.steps()
    wish = it.warm(ask_in("w", some_prompt(40, 1), deadline_s=it.engine.now_s() + 1.0))
    it.drive.steps()
    assert it.drive.has_started("w") == is_begun
    it.drive.clock.advance(2.0)
    it.drive.rest()
    assert isinstance(it.drive.error("w"), DeadlineExceeded)
    assert wish.done.exception(0) is it.drive.error("w")


def test_a_shift_takes_the_pages_of_what_a_slot_held_before_anybodys_place(tmp_path: Path):
    it = Transfers(tmp_path, context_shift=True, kv_pages=36, chunk_tokens=4)
    head = some_prompt(40)
    it.run(ask_in("old", head))
    it.engine.submit(ask_in("r", (*head, B), 1, max_tokens=40))
    it.drive.steps(20)
    assert it.drive.started("r").cached_tokens == 40
    wish = it.warm(ask_in("w", some_prompt(60, 3)))
    while it.drive.end("w") is None:
        it.drive.steps()
    # The head's pages were kept for slot 0, so that the shift had to copy them and found no room.
    assert len(it.drive.tokens("r")) > 64 - 41
    assert it.engine.snapshot().counters.preemptions == 0
    assert it.wait(wish.done).tokens == 60
    it.drive.rest()
    assert it.drive.finished("r").truncated

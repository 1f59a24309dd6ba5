"""Saving and restoring on the real engine over the fake device, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    SlotBusy,
    SlotContentNotFound,
)
from engine.memory.checkpoint import Checkpoint
from engine.slots.errors import (
    SlotFileNotFound,
)
from engine.types import CacheSource, SlotState
from tests.slot_stores import restore_wish, save_wish
from tests.unit.engine.drive import B, solo
from tests.unit.engine.scheduling.saving import NAME, Transfers, ask_in, some_prompt


@pytest.mark.parametrize("window", [None, 5, 24, 200])
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 61, 300])
def test_a_restored_slot_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, length: int, window: int | None
):
    prompt = some_prompt(length)
    first = Transfers(tmp_path, window=window, context_tokens=512, kv_pages=300, page_tokens=4)
    answer = first.run(ask_in("a", prompt))
    saved = first.save(0)
    assert saved.tokens == length + 4
    for page_tokens, context in ((4, 512), (16, 400), (64, 512)):
        other = Transfers(
            tmp_path,
            window=window,
            context_tokens=context,
            kv_pages=max(10, 1024 // page_tokens),
            page_tokens=page_tokens,
        )
        restored = other.restore(1)
        assert (restored.tokens, restored.size_bytes) == (saved.tokens, saved.size_bytes)
        other.drive.rest()
        held = (*prompt, *answer[:-1])
        # The same tokens again: all but the last are there. Extended: all of them.
        assert other.run(ask_in("same", held, 1)) == solo(held, 5, window)
        assert other.drive.started("same").cached_tokens == len(held) - 1
        other.restore(1)
        longer = (*held, B)
        assert other.run(ask_in("longer", longer, 1)) == solo(longer, 5, window)
        started = other.drive.started("longer")
        assert started.cached_tokens == len(held)
        assert started.cache_source is CacheSource.SLOT


def test_any_slot_finds_what_was_restored_into_one(tmp_path: Path):
    prompt = some_prompt(50)
    Transfers(tmp_path).run(ask_in("a", prompt))
    first = Transfers(tmp_path)
    first.run(ask_in("a", prompt))
    first.save(0)
    other = Transfers(tmp_path)
    other.restore(0)
    other.engine.submit(ask_in("busy", (B, B), 0, max_tokens=30))
    other.drive.steps(3)
    longer = (*prompt, B)
    assert other.run(ask_in("b", longer, 1)) == solo(longer, 5)
    started = other.drive.started("b")
    assert (started.cached_tokens, started.cache_source) == (50, CacheSource.INDEX)


def test_cutting_the_last_turn_of_a_window_model_still_reuses_the_rest(tmp_path: Path):
    window = 8
    first = Transfers(tmp_path, window=window, context_tokens=512, kv_pages=300)
    turn = some_prompt(120)
    first.run(ask_in("a", turn, max_tokens=1))
    first.run(ask_in("b", (*turn, *some_prompt(100, 3)), max_tokens=1))
    first.save(0)
    other = Transfers(tmp_path, window=window, context_tokens=512, kv_pages=300)
    other.restore(1)
    prompt = (*turn, *some_prompt(40, 9))
    assert other.run(ask_in("c", prompt, 1)) == solo(prompt, 5, window)
    assert other.drive.started("c").cached_tokens >= 100


@pytest.mark.parametrize("page_tokens", [4, 8, 16, 64])
@pytest.mark.parametrize("turns", [(30, 55), (33, 64, 95), (42, 71)])
def test_windows_that_meet_in_a_page_of_another_size_are_both_whole(
    tmp_path: Path, turns: tuple[int, ...], page_tokens: int
):
    window = 8
    layout: dict[str, Any] = {"window": window, "context_tokens": 256, "kv_pages": 200}
    first = Transfers(tmp_path, num_slots=4, **layout)
    for length in turns:
        first.run(ask_in(f"a{length}", some_prompt(length), max_tokens=1))
    first.save(0)
    other = Transfers(tmp_path, num_slots=4, page_tokens=page_tokens, **layout)
    for length in turns:
        other.restore(1)
        prompt, name = (*some_prompt(length), B, B), f"b{length}"
        assert other.run(ask_in(name, prompt, 1)) == solo(prompt, 5, window)
        assert other.drive.started(name).cached_tokens == length


def test_of_two_checkpoints_at_one_position_a_file_has_one(tmp_path: Path):
    """Pages that grew by turns in two slots may bring the same position twice."""
    first = Transfers(tmp_path, window=8)
    prompt = some_prompt(30)
    first.run(ask_in("a", prompt))
    table = first.engine.pools.table
    slot = table.slot(0)
    newest = table.checkpoints_of(slot, before=len(slot.tokens))[-1]
    again = Checkpoint(newest.position, newest.lowest, newest.first_page, newest.window_pages)
    table.checkpoints.add(again)
    assert table.index.attach(slot.nodes, again)
    first.save(0)
    other = Transfers(tmp_path, window=8)
    other.restore(1)
    cut = (*prompt[: newest.position], B)
    assert other.run(ask_in("b", cut, 1)) == solo(cut, 5, 8)
    assert other.drive.started("b").cached_tokens == newest.position


def test_saving_an_unused_slot_is_a_success_with_no_tokens(tmp_path: Path):
    it = Transfers(tmp_path)
    saved = it.save(1)
    assert (saved.tokens, saved.slot_id) == (0, 1)
    it.run(ask_in("a", some_prompt(9)))
    assert it.restore(0).tokens == 0
    assert it.held(0) == 0


def test_a_slot_is_itself_while_it_is_saved_and_afterwards(tmp_path: Path):
    it = Transfers(tmp_path)
    it.run(ask_in("a", some_prompt(20)))
    before = it.state()
    it.save(0)
    assert it.state() == before


def test_it_shows_as_transfer_and_nobody_takes_it_meanwhile(tmp_path: Path):
    it = Transfers(tmp_path, num_slots=1)
    it.run(ask_in("a", some_prompt(20)))
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.drive.steps()
    assert it.engine.snapshot().slots[0].state is SlotState.TRANSFER
    it.engine.submit(ask_in("b", some_prompt(20), None))
    it.wait(wish.done)
    it.drive.rest()
    assert it.drive.tokens("b") == solo(some_prompt(20), 5)


def test_a_busy_slot_is_waited_for_or_refused(tmp_path: Path):
    it = Transfers(tmp_path)
    it.engine.submit(ask_in("a", some_prompt(20), max_tokens=10))
    it.drive.steps(3)
    wishes: list[Any] = [
        save_wish(it.store, 0, NAME, fail_if_busy=True),
        restore_wish(it.store, 0, NAME, fail_if_busy=True),
    ]
    for wish in wishes:
        it.engine.transfer_slot(wish)
        with pytest.raises(SlotBusy) as caught:
            it.wait(wish.done)
        assert (caught.value.slot_id, caught.value.request_id) == (0, "a")
    assert it.save(0).tokens == 29
    assert it.drive.finished("a")


def test_a_wait_can_be_given_up(tmp_path: Path):
    it = Transfers(tmp_path)
    it.engine.submit(ask_in("a", some_prompt(20), max_tokens=10))
    it.drive.steps(3)
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.drive.steps()
    assert wish.done.cancel()
    it.drive.rest()
    assert list(tmp_path.iterdir()) == []


def test_another_tenants_content_is_not_there_to_be_saved(tmp_path: Path):
    it = Transfers(tmp_path)
    it.run(ask_in("a", some_prompt(20), tenant="0a"))
    with pytest.raises(SlotContentNotFound):
        it.save(0, tenant="0b")
    assert it.save(0, tenant="0a").tokens == 24
    # The lane itself may be reused.
    it.run(ask_in("b", some_prompt(9, 4), 0, tenant="0b"))
    assert it.restore(0, tenant="0a").tokens == 24
    longer = (*some_prompt(20), B)
    it.run(ask_in("c", longer, 0, tenant="0b"))
    assert it.drive.started("c").cached_tokens == 0
    it.restore(0, tenant="0a")
    it.run(ask_in("d", longer, 0, tenant="0a"))
    assert it.drive.started("d").cached_tokens == 20


def test_who_hears_of_an_outcome_finds_it_in_the_snapshot(tmp_path: Path):
    it = Transfers(tmp_path)
    it.run(ask_in("a", some_prompt(20)))
    seen: list[tuple[str, SlotState, int]] = []

    def look(what: str, slot_id: int) -> Callable[[object], None]:
        def told(_: object) -> None:
            slot = it.engine.snapshot().slots[slot_id]
            seen.append((what, slot.state, slot.held_tokens))

        return told

    save = save_wish(it.store, 0, NAME)
    save.done.add_done_callback(look("save", 0))
    it.engine.transfer_slot(save)
    it.wait(save.done)
    for what, name in (("restore", NAME), ("refused", "missing")):
        restore = restore_wish(it.store, 1, name)
        restore.done.add_done_callback(look(what, 1))
        it.engine.transfer_slot(restore)
        with contextlib.suppress(SlotFileNotFound):
            it.wait(restore.done)
    erase = it.engine.erase_slot(0)
    erase.add_done_callback(look("erase", 0))
    it.wait(erase)
    assert seen == [
        ("save", SlotState.IDLE, 24),
        ("restore", SlotState.IDLE, 24),
        ("refused", SlotState.IDLE, 24),
        ("erase", SlotState.IDLE, 0),
    ]

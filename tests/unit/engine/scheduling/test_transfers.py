"""Saving and restoring on the real engine over the fake device, step by step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    EngineError,
    EngineFault,
    KvPagesExhausted,
    ShuttingDown,
    SlotBusy,
    SlotContentNotFound,
)
from engine.memory.errors import PoolsBusy
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildState, RebuildWish
from engine.scheduling.wishes import RestoredSlot
from engine.slots.errors import (
    SlotContextTooSmall,
    SlotFileCorrupt,
    SlotFileMismatch,
    SlotFileNotFound,
)
from engine.step import PoolLost
from engine.types import CacheSource, CancelCause, SlotState
from tests.slot_stores import restore_wish, save_wish
from tests.unit.engine.drive import A, B, solo
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


# Refusals.


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "config", "expected"),
    [
        (Path.unlink, {}, SlotFileNotFound),
        (_cut, {}, SlotFileCorrupt),
        (_flip_last, {}, SlotFileCorrupt),
        (None, {"weights": "other"}, SlotFileMismatch),
        (None, {"window": 9}, SlotFileMismatch),
        (None, {"context_tokens": 40}, SlotContextTooSmall),
    ],
)
@pytest.mark.parametrize("is_dry", [False, True])
def test_a_refused_restore_leaves_everything_as_it_was(
    tmp_path: Path,
    damage: Callable[[Path], None] | None,
    config: dict[str, Any],
    expected: type[EngineError],
    is_dry: bool,
):
    first = Transfers(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    if damage is not None:
        damage(tmp_path / NAME)
    layout: dict[str, Any] = {"kv_pages": 18 if is_dry else 64} | config
    it = Transfers(tmp_path, **layout)
    it.run(ask_in("a", some_prompt(30, 1)))
    it.run(ask_in("b", some_prompt(30, 2), 1))
    before = it.state()
    with pytest.raises(expected):
        it.restore(0)
    it.drive.rest()
    assert it.state() == before
    for name, slot_id, seed in (("c", 0, 1), ("d", 1, 2)):
        prompt = (*some_prompt(30, seed), B)
        assert it.run(ask_in(name, prompt, slot_id)) == solo(prompt, 5, config.get("window"))
        assert it.drive.started(name).cached_tokens == 30


def test_idle_state_gives_way_to_a_whole_file(tmp_path: Path):
    first = Transfers(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = Transfers(tmp_path, kv_pages=16)
    it.run(ask_in("a", some_prompt(30, 1)))
    it.run(ask_in("b", some_prompt(25, 2), 1))
    assert it.restore(0).tokens == 54
    it.drive.rest()
    prompt = (*some_prompt(50), B)
    assert it.run(ask_in("c", prompt)) == solo(prompt, 5)
    assert it.drive.started("c").cached_tokens == 50


def test_running_requests_do_not_give_way(tmp_path: Path):
    first = Transfers(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = Transfers(tmp_path, kv_pages=16)
    it.engine.submit(ask_in("a", some_prompt(20, 1), 1, max_tokens=20))
    it.drive.steps(8)
    with pytest.raises(KvPagesExhausted) as caught:
        it.restore(0)
    assert caught.value.needed == 14
    it.drive.rest()
    assert it.drive.tokens("a") == solo(some_prompt(20, 1), 20)


def test_running_requests_keep_what_they_need_while_a_slot_is_restored(tmp_path: Path):
    """Their pages grow, step by step, while the reserved ones are filled."""
    first = Transfers(tmp_path, window=8)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = Transfers(tmp_path, window=8, kv_pages=24)
    it.engine.submit(ask_in("a", some_prompt(20, 1), 1, max_tokens=18))
    it.drive.steps(4)
    outcome: RestoredSlot | None = None
    with contextlib.suppress(KvPagesExhausted, EngineFault):
        outcome = it.restore(0)
    it.drive.rest()
    assert it.drive.tokens("a") == solo(some_prompt(20, 1), 18, 8)
    if outcome is not None:
        prompt = (*some_prompt(50), B)
        assert it.run(ask_in("c", prompt)) == solo(prompt, 5, 8)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fault_of_the_device_ends_the_transfer_alone(tmp_path: Path, at: int, is_lost: bool):
    first = Transfers(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = Transfers(tmp_path)
    it.run(ask_in("b", some_prompt(30, 1)))
    calls = itertools.count()
    runner = it.drive.runner
    for name in ("read_pages", "write_pages"):
        real = getattr(runner, name)

        def call(*args: Any, real: Callable[..., Any] = real) -> Any:
            if next(calls) == at:
                runner.fail_transfer_with = PoolLost("gone") if is_lost else MemoryError("full")
            return real(*args)

        setattr(runner, name, call)
    for work in (lambda: it.save(0, "two"), lambda: it.restore(0)):
        try:
            work()
        except EngineFault:
            assert next(calls) > at
    it.drive.rest()
    assert {path.name for path in tmp_path.iterdir()} <= {NAME, "two"}
    it.restore(1)
    prompt = (*some_prompt(50), B)
    assert it.run(ask_in("c", prompt, 1)) == solo(prompt, 5)
    assert it.drive.started("c").cached_tokens == 50


def test_a_restore_can_be_given_up_at_any_piece(tmp_path: Path):
    first = Transfers(tmp_path, context_tokens=1024, kv_pages=300)
    first.run(ask_in("a", some_prompt(900)))
    first.save(0)
    for num_steps in range(7):
        it = Transfers(tmp_path, context_tokens=1024, kv_pages=300)
        it.run(ask_in("b", some_prompt(30, 1)))
        before = it.state()
        wish = restore_wish(it.store, 0, NAME)
        it.engine.transfer_slot(wish)
        it.drive.steps(num_steps)
        if not wish.done.cancel():
            continue
        it.settle()
        assert it.state() == before


# A prompt in a save.


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
    it.warm(ask_in("w", (*some_prompt(20), *some_prompt(40, 3))))
    it.drive.steps(num_steps)
    it.engine.cancel("w", CancelCause.CLIENT)
    it.settle()
    assert it.drive.end("w") is not None
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
    it.warm(ask_in("w", some_prompt(9, 1)), fail_if_busy=True)
    it.drive.steps()
    assert isinstance(it.drive.error("w"), SlotBusy)
    it.drive.rest()


# Ends of the engine.


def test_a_stop_waits_for_a_save_within_its_time(tmp_path: Path):
    it = Transfers(tmp_path, context_tokens=1024, kv_pages=300)
    it.run(ask_in("a", some_prompt(900)))
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.drive.steps()
    it.engine.stop(grace_s=60.0)
    assert wish.done.result(0).tokens == 904
    with pytest.raises(ShuttingDown):
        it.engine.transfer_slot(save_wish(it.store, 0, NAME))


def test_a_stop_without_time_gives_transfers_up(tmp_path: Path):
    it = Transfers(tmp_path)
    it.engine.submit(ask_in("a", some_prompt(20), max_tokens=40))
    it.drive.steps(3)
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.engine.stop()
    with pytest.raises(ShuttingDown):
        wish.done.result(0)


@pytest.mark.parametrize("restores", [False, True])
def test_a_rebuild_waits_for_a_transfer_and_the_slot_goes_on_as_ever(
    tmp_path: Path, restores: bool
):
    it = Transfers(tmp_path)
    prompt = some_prompt(50)
    answer = it.run(ask_in("a", prompt))
    it.save(0)
    wish: Any = (restore_wish if restores else save_wish)(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.drive.steps()
    assert it.engine.snapshot().slots[0].state is SlotState.TRANSFER
    busy = it.engine.rebuild(RebuildWish(PoolSizes(kv=40), "at-once"))
    rebuilding = it.engine.rebuild(RebuildWish(PoolSizes(kv=40), "waits", drain_s=60.0))
    it.drive.steps()
    refused = busy.exception(0)
    assert isinstance(refused, PoolsBusy)
    assert refused.metadata() == {"cause": "transfers", "activeRequests": "0"}
    it.drive.on_the_side()
    it.wait(wish.done)
    it.settle()
    assert rebuilding.result(0).current.kv == 40
    assert it.engine.rebuilds.state is RebuildState.SERVING
    longer = (*prompt, *answer[:-1], B)
    assert it.run(ask_in("b", longer)) == solo(longer, 5)
    assert it.drive.started("b").cached_tokens == len(longer) - 1


# What once went wrong between a transfer and everything beside it.


@pytest.mark.parametrize("window", [None, 8])
def test_nobody_reads_what_is_written_after_a_prompt_was_given_up(
    tmp_path: Path, window: int | None
):
    """The prompt went on in the slot's last page; what comes back goes on there differently."""
    it = Transfers(tmp_path, window=window)
    it.run(ask_in("a", some_prompt(30), max_tokens=1))
    (tmp_path / NAME).mkdir()
    given_up = (*some_prompt(30), B, A, B)
    wish = it.warm(ask_in("w", given_up))
    with pytest.raises(EngineError, match="errno"):
        it.wait(wish.done)
    other = (*some_prompt(30), A, A, A)
    assert it.run(ask_in("b", other)) == solo(other, 5, window)
    assert it.drive.started("b").cached_tokens == 30
    assert it.run(ask_in("c", (*given_up, B), 1)) == solo((*given_up, B), 5, window)


def test_a_fault_while_room_is_made_leaves_no_slot_cut(tmp_path: Path):
    """Its last page is listed whole: who goes on in it would change what others read."""
    it = Transfers(tmp_path, kv_pages=16, host_cache_bytes=None)
    it.run(ask_in("a", some_prompt(16), max_tokens=1))
    it.run(ask_in("b", some_prompt(40, 3), 1, max_tokens=1))
    it.drive.runner.fail_transfer_with = MemoryError("full")
    it.run(ask_in("c", (*some_prompt(14), *[A + 25] * 16), max_tokens=1))
    assert isinstance(it.drive.error("c"), EngineFault)
    longer = (*some_prompt(14), A + 25, B, B)
    assert it.run(ask_in("d", longer)) == solo(longer, 5)
    whole = (*some_prompt(16), B)
    assert it.run(ask_in("e", whole, 1)) == solo(whole, 5)


def test_a_lone_request_waits_for_the_pages_of_a_transfer(tmp_path: Path):
    it = Transfers(tmp_path, kv_pages=16)
    it.run(ask_in("a", some_prompt(40)))
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.engine.submit(ask_in("b", some_prompt(16, 3), 1, max_tokens=40))
    it.wait(wish.done)
    it.drive.rest()
    assert it.drive.tokens("b") == solo(some_prompt(16, 3), 40)


def test_pools_that_are_lost_while_room_is_made_for_a_file_are_empty(tmp_path: Path):
    first = Transfers(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = Transfers(tmp_path, kv_pages=16, host_cache_bytes=None)
    it.run(ask_in("a", some_prompt(40, 1)))
    it.drive.runner.fail_transfer_with = PoolLost("gone")
    with pytest.raises(EngineFault):
        it.restore(1)
    it.drive.rest()
    assert it.held(0) == 0
    longer = (*some_prompt(40, 1), B)
    assert it.run(ask_in("b", longer)) == solo(longer, 5)
    assert it.drive.started("b").cached_tokens == 0


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

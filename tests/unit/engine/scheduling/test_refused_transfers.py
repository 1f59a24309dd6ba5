"""Transfers that are refused, given up or broken by the device: everything is as it was."""

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
)
from engine.scheduling.wishes import RestoredSlot
from engine.slots.errors import (
    SlotContextTooSmall,
    SlotFileCorrupt,
    SlotFileMismatch,
    SlotFileNotFound,
)
from engine.step import PoolLost
from engine.types import CancelCause
from tests.slot_stores import restore_wish, save_wish
from tests.unit.engine.drive import B, solo
from tests.unit.engine.scheduling.saving import NAME, Transfers, ask_in, some_prompt


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


def test_a_window_that_running_requests_leave_no_room_for_costs_nobody_anything(tmp_path: Path):
    # Saved in large pages, so that more of the window is kept than a slot has room for here.
    first = Transfers(tmp_path, window=8, context_tokens=256, page_tokens=64, chunk_tokens=64)
    first.run(ask_in("a", some_prompt(147)))
    first.save(0)
    it = Transfers(tmp_path, window=8, context_tokens=256, kv_pages=200, num_slots=3)
    it.run(ask_in("own", some_prompt(30, 1)))
    for slot_id in (1, 2):
        it.engine.submit(
            ask_in(f"r{slot_id}", some_prompt(20, slot_id + 1), slot_id, max_tokens=60)
        )
    it.drive.steps(4)
    with pytest.raises(KvPagesExhausted) as caught:
        it.restore(0)
    assert caught.value.needed == 22
    it.drive.rest()
    for slot_id in (1, 2):
        assert it.drive.tokens(f"r{slot_id}") == solo(some_prompt(20, slot_id + 1), 60, 8)
    prompt = (*some_prompt(30, 1), B)
    assert it.run(ask_in("c", prompt)) == solo(prompt, 5, 8)
    assert it.drive.started("c").cached_tokens == 30


def test_earlier_windows_are_left_out_before_a_slot_is_emptied_for_them(tmp_path: Path):
    window, turns = 8, (62, 130, 202)
    layout: dict[str, Any] = {"window": window, "context_tokens": 512, "kv_pages": 400}
    first = Transfers(tmp_path, num_slots=4, **layout)
    for length in turns:
        first.run(ask_in(f"a{length}", some_prompt(length), max_tokens=1))
    first.save(0)
    it = Transfers(tmp_path, num_slots=3, **layout)
    it.run(ask_in("idle", some_prompt(30, 1), 1))
    it.engine.submit(ask_in("r", some_prompt(50, 2), 2, max_tokens=400))
    it.drive.steps(50)
    # 33 pages, of which the others hold at least 14; three windows take 21.
    assert it.restore(0).tokens == 202
    assert it.held(1) == 34
    for length in reversed(turns):
        prompt, name = (*some_prompt(length), B, B), f"b{length}"
        it.engine.submit(ask_in(name, prompt, max_tokens=1))
        while it.drive.end(name) is None:
            it.drive.steps()
        assert it.drive.tokens(name) == solo(prompt, 1, window)
    assert it.drive.started("b202").cached_tokens == 202
    it.engine.cancel("r", CancelCause.CLIENT)
    it.drive.rest()


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


@pytest.mark.parametrize("kind", ["save", "restore", "warm"])
def test_a_transfer_for_which_no_thread_can_be_started_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    it = Transfers(tmp_path)
    it.run(ask_in("a", some_prompt(30)))
    it.save(0)
    it.drive.rest()
    before = it.state()

    def refuse(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("engine.side_threads.start_on_thread", refuse)
        if kind == "warm":
            wish = it.warm(ask_in("w", some_prompt(40, 3)))
        else:
            wish = (save_wish if kind == "save" else restore_wish)(it.store, 0, NAME)
            it.engine.transfer_slot(wish)
        it.drive.rest()
    error = wish.done.exception(0)
    assert isinstance(error, EngineFault)
    assert isinstance(error.__cause__, RuntimeError)
    assert it.state()[0] == before[0]
    prompt = (*some_prompt(30), B)
    assert it.run(ask_in("b", prompt)) == solo(prompt, 5)
    assert it.drive.started("b").cached_tokens == 30


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

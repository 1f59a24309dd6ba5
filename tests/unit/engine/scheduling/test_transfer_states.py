"""Saving and restoring sequences of a model with recurrent layers, on the fake device.

Pages of 4 tokens, a snapshot every 32 of a prompt and one token before its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, EngineFault
from engine.slots.errors import SlotContextTooSmall, SlotFileCorrupt, SlotFileMismatch
from engine.step import PoolLost
from engine.types import CacheSource, CancelCause, Failed
from tests.unit.engine.drive import B, solo
from tests.unit.engine.scheduling.saving import NAME, Transfers, ask_in, some_prompt


def _recurrent(root: Path, mamba_slots: int = 10, **config: Any) -> Transfers:
    sizes: dict[str, Any] = {"context_tokens": 512, "kv_pages": 300}
    return Transfers(root, mamba_slots=mamba_slots, **sizes | config)


@pytest.mark.parametrize("length", [1, 2, 4, 16, 17, 33, 61, 300])
@pytest.mark.parametrize("mamba_slots", [2, 3, 10])
def test_a_restored_slot_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, length: int, mamba_slots: int
):
    prompt = some_prompt(length)
    first = _recurrent(tmp_path)
    answer = first.run(ask_in("a", prompt))
    saved = first.save(0)
    held = (*prompt, *answer[:-1])
    assert saved.tokens == len(held)
    for page_tokens, context in ((4, 512), (16, 400), (64, 512)):
        layout = {"kv_pages": max(10, 1024 // page_tokens), "page_tokens": page_tokens}
        other = _recurrent(tmp_path, mamba_slots, context_tokens=context, **layout)
        restored = other.restore(1)
        assert (restored.tokens, restored.size_bytes) == (saved.tokens, saved.size_bytes)
        other.drive.rest()
        # Extended: all of them are there. The prompt again: all but one, if there is a snapshot.
        longer = (*held, B)
        assert other.run(ask_in("longer", longer, 1)) == solo(longer, 5)
        started = other.drive.started("longer")
        assert (started.cached_tokens, started.cache_source) == (len(held), CacheSource.SLOT)
        other.restore(1)
        assert other.run(ask_in("same", prompt, 1)) == solo(prompt, 5)
        has_snapshot = mamba_slots > 2
        assert other.drive.started("same").cached_tokens == (length - 1 if has_snapshot else 0)


def test_any_slot_finds_what_was_restored_into_one(tmp_path: Path):
    prompt = some_prompt(50)
    first = _recurrent(tmp_path)
    first.run(ask_in("a", prompt))
    first.save(0)
    other = _recurrent(tmp_path)
    other.restore(0)
    other.engine.submit(ask_in("busy", (B, B), 0, max_tokens=30))
    other.drive.steps(3)
    assert other.run(ask_in("b", prompt, 1)) == solo(prompt, 5)
    started = other.drive.started("b")
    assert (started.cached_tokens, started.cache_source) == (49, CacheSource.INDEX)


def test_cutting_the_last_turn_reuses_the_turn_before(tmp_path: Path):
    first = _recurrent(tmp_path)
    turn = some_prompt(60)
    answer = first.run(ask_in("a", turn))
    second = (*turn, *answer, *some_prompt(20, 3))
    first.run(ask_in("b", second))
    first.save(0)
    other = _recurrent(tmp_path)
    other.restore(1)
    prompt = (*turn, *answer, *some_prompt(9, 9))
    assert other.run(ask_in("c", prompt, 1)) == solo(prompt, 5)
    assert other.drive.started("c").cached_tokens == 59


def test_a_pool_of_few_states_keeps_the_newest_snapshot(tmp_path: Path):
    prompt = some_prompt(120)
    first = _recurrent(tmp_path)
    first.run(ask_in("a", prompt))
    first.save(0)
    other = _recurrent(tmp_path, mamba_slots=3)
    other.restore(0)
    assert other.run(ask_in("b", prompt)) == solo(prompt, 5)
    assert other.drive.started("b").cached_tokens == 119


def test_a_prompt_is_computed_saved_and_stays(tmp_path: Path):
    it = _recurrent(tmp_path)
    prompt = some_prompt(40)
    assert it.wait(it.warm(ask_in("w", prompt)).done).tokens == 40
    it.drive.rest()
    other = _recurrent(tmp_path)
    other.restore(0)
    longer = (*prompt, B)
    for engine in (it, other):
        assert engine.run(ask_in("same", prompt, 1)) == solo(prompt, 5)
        assert engine.drive.started("same").cached_tokens == 39
        assert engine.run(ask_in("longer", longer, 0)) == solo(longer, 5)
        assert engine.drive.started("longer").cached_tokens == 40


@pytest.mark.parametrize("mamba_slots", [2, 3, 10])
def test_what_the_slot_held_stays_until_the_file_is_in_place(tmp_path: Path, mamba_slots: int):
    it = _recurrent(tmp_path, mamba_slots)
    answer = it.run(ask_in("a", some_prompt(30)))
    (tmp_path / NAME).mkdir()
    slots, _ = it.state()
    wish = it.warm(ask_in("w", some_prompt(40, 3)))
    with pytest.raises(EngineError, match="errno"):
        it.wait(wish.done)
    it.drive.rest()
    kept, _ = it.state()
    longer = (*some_prompt(30), *answer)
    assert it.run(ask_in("b", longer)) == solo(longer, 5)
    # With a state to keep the old one in, which is the least that a snapshot needs too.
    if mamba_slots > 2:
        assert kept == slots
        assert it.drive.started("b").cached_tokens == 34


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_prompt_that_is_cancelled_leaves_the_slot(tmp_path: Path, num_steps: int):
    it = _recurrent(tmp_path)
    answer = it.run(ask_in("a", some_prompt(30)))
    slots, _ = it.state()
    it.warm(ask_in("w", (*some_prompt(20), *some_prompt(40, 3))))
    it.drive.steps(num_steps)
    it.engine.cancel("w", CancelCause.CLIENT)
    it.settle()
    assert it.drive.end("w") is not None
    if not (tmp_path / NAME).exists():
        assert it.state()[0] == slots
        longer = (*some_prompt(30), *answer)
        assert it.run(ask_in("b", longer)) == solo(longer, 5)
        assert it.drive.started("b").cached_tokens == 34


def test_a_prompt_continues_what_the_slot_holds(tmp_path: Path):
    it = _recurrent(tmp_path)
    answer = it.run(ask_in("a", some_prompt(30)))
    longer = (*some_prompt(30), *answer, *some_prompt(20, 5))
    it.wait(it.warm(ask_in("w", longer)).done)
    assert it.drive.started("w").cached_tokens == 34
    it.drive.rest()
    assert it.run(ask_in("b", (*longer, B))) == solo((*longer, B), 5)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "config", "expected"),
    [
        (_cut, {}, SlotFileCorrupt),
        (_flip_last, {}, SlotFileCorrupt),
        (None, {"weights": "other"}, SlotFileMismatch),
        (None, {"mamba_slots": None}, SlotFileMismatch),
        (None, {"context_tokens": 40}, SlotContextTooSmall),
    ],
)
@pytest.mark.parametrize("kv_pages", [20, 300])
def test_a_refused_restore_leaves_everything_as_it_was(
    tmp_path: Path,
    damage: Callable[[Path], None] | None,
    config: dict[str, Any],
    expected: type[EngineError],
    kv_pages: int,
):
    first = _recurrent(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    if damage is not None:
        damage(tmp_path / NAME)
    sizes: dict[str, Any] = {"mamba_slots": 10, "kv_pages": kv_pages}
    it = Transfers(tmp_path, **sizes | config)
    runs = (("a", 1), ("b", 2))
    answers = [
        it.run(ask_in(name, some_prompt(30, seed), slot_id))
        for slot_id, (name, seed) in enumerate(runs)
    ]
    before = it.state()
    with pytest.raises(expected):
        it.restore(0)
    it.drive.rest()
    assert it.state() == before
    for slot_id, (name, seed) in enumerate(runs):
        prompt = (*some_prompt(30, seed), *answers[slot_id])
        assert it.run(ask_in(f"{name}2", prompt, slot_id)) == solo(prompt, 5)
        assert it.drive.started(f"{name}2").cached_tokens == 34


def test_snapshots_that_running_rows_take_meanwhile_are_saved_as_they_were(tmp_path: Path):
    """The only spare state is the saved slot's snapshot; a long prompt takes it for its own."""
    it = _recurrent(tmp_path, mamba_slots=3)
    prompt = some_prompt(60)
    it.run(ask_in("a", prompt))
    it.engine.submit(ask_in("other", some_prompt(300, 7), 1, max_tokens=5))
    assert it.save(0).tokens == 64
    it.drive.rest()
    assert it.drive.tokens("other") == solo(some_prompt(300, 7), 5)
    fresh = _recurrent(tmp_path)
    fresh.restore(0)
    assert fresh.run(ask_in("b", prompt)) == solo(prompt, 5)
    assert fresh.drive.started("b").cached_tokens == 59


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fault_of_the_device_ends_the_transfer_alone(tmp_path: Path, at: int, is_lost: bool):
    first = _recurrent(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = _recurrent(tmp_path)
    it.run(ask_in("b", some_prompt(30, 1)))
    calls, is_armed = itertools.count(), True
    runner = it.drive.runner
    for name in ("read_state", "write_state", "copy_state"):
        real = getattr(runner, name)

        def call(*args: Any, real: Callable[..., Any] = real) -> Any:
            if is_armed and next(calls) == at:
                runner.fail_transfer_with = PoolLost("gone") if is_lost else MemoryError("full")
            return real(*args)

        setattr(runner, name, call)
    for work in (lambda: it.save(0, "two"), lambda: it.restore(0), lambda: _warm(it)):
        try:
            work()
        except EngineFault:
            assert next(calls) > at
        it.drive.rest()
    assert {path.name for path in tmp_path.iterdir()} <= {NAME, "two", "three"}
    is_armed = False
    prompt = some_prompt(50)
    it.restore(1)
    assert it.run(ask_in("c", prompt, 1)) == solo(prompt, 5)
    assert it.drive.started("c").cached_tokens == 49


def _warm(it: Transfers) -> None:
    it.warm(ask_in("w", some_prompt(45, 4)), "three")
    it.settle()
    end = it.drive.end("w")
    if isinstance(end, Failed):
        raise end.error

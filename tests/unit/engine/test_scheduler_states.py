"""Requests on a model with recurrent layers. Pages of 4 tokens, a snapshot every 32 of a prompt."""

from __future__ import annotations

import pytest

from engine.step import PoolLost
from engine.types import CacheSource, Failed, PoolKind
from tests.unit.engine.drive import A, B, Drive, ask, solo


def drive_states(
    mamba_slots: int = 10, *, num_slots: int = 2, kv_pages: int = 80, chunk_tokens: int = 16
) -> Drive:
    return Drive(
        num_slots=num_slots,
        context_tokens=128,
        kv_pages=kv_pages,
        chunk_tokens=chunk_tokens,
        mamba_slots=mamba_slots,
    )


def served(
    drive: Drive, name: str, prompt: list[int], count: int = 5, slot: int | None = None
) -> int:
    """Runs a request to its end, checks its answer and returns how many tokens were cached."""
    drive.engine.submit(ask(name, prompt, count, slot_id=slot))
    drive.rest()
    assert drive.tokens(name) == solo(prompt, count)
    return drive.started(name).cached_tokens


@pytest.mark.parametrize("mamba_slots", [2, 3, 10])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 16, 64])
def test_chunks_and_snapshots_do_not_change_the_answer(mamba_slots: int, chunk_tokens: int) -> None:
    drive = drive_states(mamba_slots, chunk_tokens=chunk_tokens)
    for name, token in (("a", A), ("b", B)):
        drive.engine.submit(ask(name, [token] * 50, 40))
    drive.rest()
    assert drive.tokens("a") == solo([A] * 50, 40)
    assert drive.tokens("b") == solo([B] * 50, 40)


@pytest.mark.parametrize("length", [2, 4, 5, 31, 32, 33, 34, 70])
@pytest.mark.parametrize("slot", [0, 1])
def test_the_same_prompt_again_evaluates_one_token(length: int, slot: int) -> None:
    drive = drive_states()
    prompt = [A] * (length - 1) + [B]
    served(drive, "cold", prompt, slot=0)
    assert served(drive, "warm", prompt, slot=slot) == length - 1
    assert drive.started("warm").cache_source is (CacheSource.INDEX if slot else CacheSource.SLOT)
    assert served(drive, "again", prompt, slot=slot) == length - 1


def test_the_next_turn_of_a_conversation_goes_on_from_all_that_its_slot_holds() -> None:
    drive = drive_states()
    prompt = [A] * 20
    served(drive, "first", prompt, 8)
    turn = prompt + drive.tokens("first") + [B, A]
    assert served(drive, "second", turn) == len(prompt) + 8 - 1


def test_a_prompt_that_parts_earlier_falls_back_to_the_snapshot_before() -> None:
    drive = drive_states()
    served(drive, "long", [A] * 90)
    assert served(drive, "other", [A] * 70 + [B] * 5) == 64


def test_no_snapshot_before_the_fork_means_to_begin_again_and_says_why() -> None:
    drive = drive_states()
    served(drive, "long", [A] * 30)
    assert served(drive, "other", [A] * 20 + [B] * 5) == 0
    assert drive.started("other").no_reuse == (
        "the recurrent state after token 20, or an earlier one, is no longer held"
    )


def test_without_room_for_snapshots_only_the_slot_itself_goes_on() -> None:
    drive = drive_states(2)
    prompt = [A] * 20
    served(drive, "first", prompt, 8)
    assert drive.pool(PoolKind.MAMBA).cached == 0
    turn = prompt + drive.tokens("first") + [B, A]
    assert served(drive, "second", turn) == 27
    assert served(drive, "again", prompt) == 0


def test_the_least_recently_used_snapshot_makes_room() -> None:
    drive = drive_states(4)  # two snapshots
    served(drive, "a", [A] * 10, slot=0)
    served(drive, "b", [B] * 10, slot=0)
    assert served(drive, "a again", [A] * 10, slot=0) == 9
    served(drive, "c", [B, A] * 5, slot=0)
    assert drive.pool(PoolKind.MAMBA).cached == 2
    assert served(drive, "a once more", [A] * 10, slot=1) == 9
    assert served(drive, "b again", [B] * 10, slot=1) == 0


def test_the_pool_is_listed_with_its_numbers() -> None:
    drive = drive_states(6)
    empty = drive.pool(PoolKind.MAMBA)
    assert (empty.size, empty.free, empty.floor, empty.unit_bytes) == (6, 6, 2, 100)
    drive.engine.submit(ask("a", [A] * 40, 10))
    drive.steps(4)  # 16, 32, 39 and 40 tokens
    running = drive.pool(PoolKind.MAMBA)
    assert (running.used, running.pinned, running.cached, running.free) == (1, 0, 2, 3)
    drive.rest()
    idle = drive.pool(PoolKind.MAMBA)
    assert (idle.used, idle.pinned, idle.cached, idle.free) == (0, 1, 2, 3)


def test_a_snapshot_that_cannot_be_copied_ends_its_request_alone() -> None:
    drive = drive_states()
    drive.engine.submit(ask("a", [A] * 10))
    drive.runner.fail_transfer_with = MemoryError("the device is out of memory")
    drive.rest()
    assert isinstance(drive.of("a")[-1], Failed)
    assert drive.pool(PoolKind.MAMBA).cached == 0
    assert served(drive, "b", [A] * 10) == 9, "what was evaluated is kept"


def test_everybody_begins_again_when_the_pools_are_lost_with_a_snapshot() -> None:
    drive = drive_states()
    drive.engine.submit(ask("a", [A] * 10, 20))
    drive.steps(4)
    drive.engine.submit(ask("b", [B] * 10))
    drive.runner.fail_transfer_with = PoolLost("gone")
    drive.rest()
    assert isinstance(drive.of("b")[-1], Failed)
    assert drive.tokens("a") == solo([A] * 10, 20)
    assert drive.engine.snapshot().counters.preemptions == 1


def test_a_preempted_request_gives_the_same_answer() -> None:
    drive = drive_states(kv_pages=20)
    for name, token in (("a", A), ("b", B)):
        drive.engine.submit(ask(name, [token] * 30, 20))
    drive.rest()
    assert drive.engine.snapshot().counters.preemptions
    assert drive.tokens("a") == solo([A] * 30, 20)
    assert drive.tokens("b") == solo([B] * 30, 20)

"""Requests on a model with sliding-window layers. Pages of 4 tokens, a window of 8, slack of 16."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.types import CacheSource, CancelCause, Cancelled, PoolKind
from tests.unit.engine.drive import A, B, Drive, ask, solo

WINDOW = 8
# Positions from n - 24 on are kept: six pages, or seven when the first is kept in part.
IDLE_PAGES = 7


def drive_windows(
    *, num_slots: int = 2, kv_pages: int = 80, chunk_tokens: int = 16, interval: int = 8
) -> Drive:
    return Drive(
        num_slots=num_slots,
        context_tokens=128,
        kv_pages=kv_pages,
        chunk_tokens=chunk_tokens,
        window=WINDOW,
        swa_evict_interval=interval,
    )


def answer(prompt: Sequence[int], count: int) -> list[int]:
    return solo(prompt, count, WINDOW)


@pytest.mark.parametrize(("chunk_tokens", "interval"), [(16, 8), (3, 20), (1, 1), (60, 128)])
def test_chunks_and_trims_do_not_change_the_answer(chunk_tokens: int, interval: int) -> None:
    drive = drive_windows(chunk_tokens=chunk_tokens, interval=interval)
    for name, token in (("a", A), ("b", B)):
        drive.engine.submit(ask(name, [token] * 50, 40))
    drive.rest()
    assert drive.tokens("a") == answer([A] * 50, 40)
    assert drive.tokens("b") == answer([B] * 50, 40)


def test_pages_behind_the_window_are_given_back_after_every_chunk() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("a", [A] * 100))
    used: list[int] = []
    for _ in range(5):
        drive.steps()
        used.append(drive.pool(PoolKind.SWA).used)
    # After 16, 32, 48, 64 and 80 tokens; kept are the positions from n - 24 on.
    assert used == [4, 6, 6, 6, 6]
    assert drive.pool(PoolKind.KV).used == 100 // 4 + 1


def test_pages_behind_the_window_are_given_back_after_a_prompts_last_few_tokens() -> None:
    """They take rows and no chunk, and no trim of decodes is due after four."""
    drive = drive_windows()
    drive.engine.submit(ask("a", [A] * 100))
    drive.steps(7)
    assert drive.runner.batches[6].chunk is None
    assert drive.engine.snapshot().slots[1].held_tokens == 100
    assert drive.pool(PoolKind.SWA).used == 6


def test_pages_behind_the_window_are_given_back_every_interval_of_decodes() -> None:
    drive = drive_windows(interval=8)
    drive.engine.submit(ask("a", [A] * 32, 40))
    drive.steps(2)
    used: list[int] = []
    for _ in range(17):
        drive.steps()
        used.append(drive.pool(PoolKind.SWA).used)
    # Grows by a page every 4 tokens, from the trim at 32 tokens to those at 40 and 48.
    assert used == [7, 7, 7, 7, 8, 8, 8, 6, 7, 7, 7, 7, 8, 8, 8, 6, 7]


def test_both_pools_are_listed_with_their_numbers() -> None:
    drive = drive_windows()
    kv, swa = drive.engine.snapshot().pools
    assert (kv.kind, swa.kind) == (PoolKind.KV, PoolKind.SWA)
    # Per slot ceil((8 + 16 + max(8, 16)) / 4) + 1 pages.
    assert (swa.size, swa.floor, swa.free) == (22, 22, 22)
    # Of 2^40 bytes 1000 are fixed, and each pool has a sink.
    left = (1 << 40) - 1000 - (kv.size + 1) * kv.unit_bytes
    assert swa.ceiling == left // swa.unit_bytes - 1
    # One layer of the fake model's three, two heads of 8 + 8 in f16.
    assert (swa.unit_tokens, swa.unit_bytes) == (4, 4 * 2 * 16 * 2)
    assert kv.unit_bytes == 2 * swa.unit_bytes


def test_an_idle_slot_keeps_its_window_and_the_slack() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("a", [A] * 90, 20))
    drive.rest()
    swa = drive.pool(PoolKind.SWA)
    # 109 tokens: positions from 85 on.
    assert swa.pinned == 28 - 85 // 4 == IDLE_PAGES
    assert swa.free + swa.cached == swa.size - IDLE_PAGES


def test_the_same_prompt_again_is_reused_within_the_slack() -> None:
    drive = drive_windows()
    for name in ("cold", "warm"):
        drive.engine.submit(ask(name, [A] * 60, 17))
        drive.rest()
    assert drive.started("warm").cached_tokens == 59
    assert drive.started("warm").no_reuse == ""
    assert drive.tokens("warm") == drive.tokens("cold") == answer([A] * 60, 17)


def test_the_same_prompt_after_a_long_answer_goes_on_from_the_end_of_the_prompt() -> None:
    drive = drive_windows()
    for name in ("cold", "again"):
        drive.engine.submit(ask(name, [A] * 60, 40))
        drive.rest()
    started = drive.started("again")
    assert (started.cached_tokens, started.cache_source) == (59, CacheSource.INDEX)
    assert drive.tokens("again") == drive.tokens("cold") == answer([A] * 60, 40)


def test_cutting_the_last_turn_goes_on_from_the_turn_before() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("first", [A] * 40, 40))
    drive.rest()
    turn = [*[A] * 40, *drive.tokens("first")]
    drive.engine.submit(ask("second", [*turn, *[B] * 30], 30))
    drive.rest()
    other = [*turn, *[B + 1] * 20]
    drive.engine.submit(ask("instead", other, 20))
    drive.rest()
    # Of the 80 tokens that both turns begin with, 79 were evaluated when the first one ended.
    assert drive.started("instead").cached_tokens == 79
    assert drive.tokens("instead") == answer(other, 20)


def test_a_prefix_whose_window_is_gone_starts_again_and_says_why() -> None:
    drive = drive_windows(chunk_tokens=64)
    drive.engine.submit(ask("long", [A] * 90, 3))
    drive.rest()
    prompt = [A] * 30 + [B] * 5
    drive.engine.submit(ask("short", prompt))
    drive.rest()
    started = drive.started("short")
    assert (started.cached_tokens, started.no_reuse) == (
        0,
        "the window before token 30 is no longer held",
    )
    assert drive.tokens("short") == answer(prompt, 5)


def test_a_conversation_continues_after_a_long_answer() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("first", [A] * 40, 40))
    drive.rest()
    turn = [*[A] * 40, *drive.tokens("first"), B, B]
    drive.engine.submit(ask("second", turn, 20))
    drive.rest()
    assert drive.started("second").cached_tokens == 79
    assert drive.tokens("second") == answer(turn, 20)


def test_a_cancel_in_mid_prefill_keeps_a_window_to_go_on_from() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("a", [A] * 100))
    drive.steps(4)
    drive.engine.cancel("a", CancelCause.CLIENT)
    drive.rest()
    assert drive.end("a") == Cancelled(CancelCause.CLIENT)
    assert drive.pool(PoolKind.SWA).pinned == 6
    drive.engine.submit(ask("b", [A] * 100))
    drive.rest()
    assert drive.started("b").cached_tokens == 64
    assert drive.tokens("b") == answer([A] * 100, 5)


def test_a_preempted_request_fills_its_window_again() -> None:
    drive = drive_windows(kv_pages=26)
    for name, token in (("older", A), ("younger", B)):
        drive.engine.submit(ask(name, [token] * 40, 40))
    while drive.engine.snapshot().counters.preemptions == 0:
        drive.steps()
    share = drive.pool(PoolKind.SWA).floor // 2
    assert drive.pool(PoolKind.SWA).used <= share
    assert drive.pool(PoolKind.SWA).pinned == 0
    drive.rest()
    assert drive.tokens("older") == answer([A] * 40, 40)
    assert drive.tokens("younger") == answer([B] * 40, 40)


def test_erasing_a_slot_frees_its_window() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("a", [A] * 90, 20))
    drive.rest()
    done = drive.engine.erase_slot(1)
    drive.steps()
    assert done.result(timeout=0).tokens == 109
    swa = drive.pool(PoolKind.SWA)
    assert (swa.free, swa.pinned) == (swa.size, 0)


def test_evicting_a_slot_frees_its_window() -> None:
    drive = drive_windows(kv_pages=26)
    drive.engine.submit(ask("old", [A] * 60, 2, slot_id=0))
    drive.rest()
    drive.engine.submit(ask("new", [B] * 90, 2, slot_id=1))
    drive.rest()
    assert drive.engine.snapshot().counters.evicted_slots == 1
    assert drive.engine.snapshot().slots[0].held_tokens == 0
    # 91 tokens: positions from 67 on.
    assert drive.pool(PoolKind.SWA).pinned == 23 - 67 // 4


def test_a_failed_step_frees_the_windows_of_its_rows() -> None:
    drive = drive_windows()
    drive.engine.submit(ask("a", [A] * 60))
    drive.steps(2)
    drive.runner.fail_with = MemoryError("out of memory")
    drive.steps()
    swa = drive.pool(PoolKind.SWA)
    assert (swa.free, swa.used, swa.pinned) == (swa.size, 0, 0)
    drive.engine.submit(ask("b", [A] * 60))
    drive.rest()
    assert drive.tokens("b") == answer([A] * 60, 5)


def test_many_long_prompts_at_once_fit_in_the_floor() -> None:
    drive = drive_windows(num_slots=6, kv_pages=200)
    for i in range(6):
        drive.engine.submit(ask(f"r{i}", [A + i] * 90, 30))
    drive.rest()
    for i in range(6):
        assert drive.tokens(f"r{i}") == answer([A + i] * 90, 30)

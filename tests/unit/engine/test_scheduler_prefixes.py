"""Prompts that others have read before, and contexts that are shifted."""

from __future__ import annotations

import numpy as np
import pytest

from engine.memory.host_tier import NODE_BYTES
from engine.types import CacheSource, CancelCause, FinishReason, PoolKind
from tests.fake_logits import model_logits, moved
from tests.fake_text import FakeTokenizer
from tests.unit.engine.drive import A, B, Drive, ask, solo

SYSTEM = [A, B, A, A, B, B, A, B, A, A]


def test_a_prompt_that_another_slot_has_read_is_shared() -> None:
    drive = Drive()
    drive.engine.submit(ask("first", [*SYSTEM, A], slot_id=0))
    drive.rest()
    drive.engine.submit(ask("second", [*SYSTEM, B], slot_id=1))
    drive.rest()
    started = drive.started("second")
    assert (started.cached_tokens, started.cache_source) == (10, CacheSource.INDEX)
    assert drive.tokens("second") == solo([*SYSTEM, B], 5)
    # The first slot has lost nothing.
    drive.engine.submit(ask("third", [*SYSTEM, A], slot_id=0))
    drive.rest()
    assert drive.started("third").cache_source is CacheSource.SLOT
    assert drive.tokens("third") == drive.tokens("first")


def test_samples_wait_for_the_one_that_reads_their_prompt() -> None:
    drive = Drive(num_slots=4, chunk_tokens=4)
    for i in range(4):
        drive.engine.submit(ask(f"s{i}", SYSTEM, group="g"))
    drive.rest()
    assert [drive.started(f"s{i}").cached_tokens for i in range(4)] == [0, 9, 9, 9]
    assert all(drive.tokens(f"s{i}") == solo(SYSTEM, 5) for i in range(4))
    counters = drive.engine.snapshot().counters
    assert (counters.prompt_tokens_evaluated, counters.prompt_tokens_cached) == (13, 27)


def test_eight_clients_with_eight_system_prompts_on_two_slots() -> None:
    drive = Drive(num_slots=2, kv_pages=200, context_tokens=64)
    prompts = [[A + i, *SYSTEM, *SYSTEM, A + i] for i in range(8)]
    histories = [list(prompt) for prompt in prompts]
    for turn in range(3):
        for client in range(8):
            drive.engine.submit(ask(f"{client}.{turn}", histories[client]))
        drive.rest()
        for client, history in enumerate(histories):
            name = f"{client}.{turn}"
            assert drive.tokens(name) == solo(history, 5)
            if turn:
                # All of the turn before but its last token, which was never evaluated.
                assert drive.started(name).cached_tokens == len(history) - 2
            history += [*drive.tokens(name), B]


def test_a_request_that_waits_for_a_prompt_that_is_cancelled_reads_it_itself() -> None:
    drive = Drive(chunk_tokens=2)
    drive.engine.submit(ask("reader", SYSTEM))
    drive.engine.submit(ask("waits", SYSTEM))
    drive.steps(2)
    assert not drive.has_started("waits")
    drive.engine.cancel("reader", CancelCause.CLIENT)
    drive.rest()
    assert drive.tokens("waits") == solo(SYSTEM, 5)


def test_prompts_under_other_tenants_do_not_wait_for_each_other() -> None:
    drive = Drive(chunk_tokens=2)
    drive.engine.submit(ask("a", SYSTEM, tenant="a"))
    drive.engine.submit(ask("b", SYSTEM, tenant="b"))
    drive.steps(1)
    assert drive.has_started("b")
    drive.rest()
    assert drive.started("b").cached_tokens == 0


def test_pages_that_only_the_index_holds_are_cached_and_go_first() -> None:
    drive = Drive(num_slots=1, kv_pages=16, context_tokens=64)
    drive.engine.submit(ask("old", [A] * 20, 1))
    drive.rest()
    drive.engine.submit(ask("new", [B] * 20, 1))
    drive.rest()
    pool = drive.pool(PoolKind.KV)
    assert (pool.pinned, pool.cached, pool.free) == (5, 5, 6)
    drive.engine.submit(ask("large", [B] * 20 + [A] * 30, 1))
    drive.rest()
    assert drive.started("large").cached_tokens == 20
    assert drive.pool(PoolKind.KV).cached < 5
    assert drive.engine.snapshot().counters.evicted_slots == 0


def test_the_host_gives_back_what_the_pool_had_no_room_for() -> None:
    drive = Drive(num_slots=1, kv_pages=16, context_tokens=64, host_cache_bytes=None)
    assert drive.engine.snapshot().host_cache_bytes == 0
    for name, token in (("a", A), ("b", B), ("c", A + 2)):
        drive.engine.submit(ask(name, [token] * 40, 1))
        drive.rest()
    # Of three prompts of 10 pages the pool has room for 16 pages.
    assert drive.engine.snapshot().host_cache_bytes > 14 * NODE_BYTES
    drive.engine.submit(ask("again", [A] * 40))
    drive.rest()
    started = drive.started("again")
    assert (started.cached_tokens, started.cache_source) == (39, CacheSource.HOST)
    assert drive.tokens("again") == solo([A] * 40, 5)


def test_the_host_is_bounded() -> None:
    limit = 20 * 3 * (NODE_BYTES + 16)  # three pages, of which the books take more than the rest
    drive = Drive(num_slots=1, kv_pages=8, context_tokens=64, host_cache_bytes=limit)
    for turn in range(6):
        drive.engine.submit(ask(f"r{turn}", [A + turn] * 28, 1))
        drive.rest()
        assert drive.engine.snapshot().host_cache_bytes <= limit
    drive.engine.submit(ask("again", [A] * 28))
    drive.rest()
    assert drive.started("again").cached_tokens == 0


def test_erasing_a_slot_forgets_what_only_it_held() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", SYSTEM, slot_id=0))
    drive.rest()
    done = drive.engine.erase_slot(0)
    drive.steps()
    erased = done.result(timeout=0)
    assert (erased.tokens, erased.pages) == (14, 4)
    pool = drive.pool(PoolKind.KV)
    assert pool.free == pool.size
    drive.engine.submit(ask("b", SYSTEM, slot_id=1))
    drive.rest()
    assert drive.started("b").cached_tokens == 0


# Shifted contexts.


def shifting(prompt: list[int], count: int, context: int, keep: int, discard: int) -> list[int]:
    """The fake model's answer when a full context loses tokens behind the first `keep`."""
    history, found = list(prompt), list[int]()
    for _ in range(count):
        if len(history) == context:
            held, pending = history[:-1], history[-1]
            drop = discard or (len(held) - keep) // 2
            history = [*held[:keep], *map(moved, held[keep + drop :]), pending]
        logits = model_logits(history, FakeTokenizer().vocab_size)
        logits[1] = -np.inf
        found.append(int(logits.argmax()))
        history.append(found[-1])
    return found


@pytest.mark.parametrize(("n_keep", "n_discard", "keep"), [(0, 0, 1), (3, 5, 4), (-1, 2, 11)])
def test_a_full_context_is_shifted_and_the_request_goes_on(
    n_keep: int, n_discard: int, keep: int
) -> None:
    drive = Drive(context_shift=True)
    drive.engine.submit(ask("a", SYSTEM, 150, n_keep=n_keep, n_discard=n_discard))
    drive.rest()
    end = drive.finished("a")
    assert (end.reason, end.truncated) == (FinishReason.LENGTH, True)
    assert drive.tokens("a") == shifting(SYSTEM, 150, 64, keep, n_discard)
    assert end.held_tokens < 64


def test_samples_of_one_prompt_are_shifted_too() -> None:
    drive = Drive(context_shift=True)
    for name in ("one", "other"):
        drive.engine.submit(ask(name, SYSTEM, 100, group="g"))
    drive.rest()
    expected = shifting(SYSTEM, 100, 64, 1, 0)
    assert drive.tokens("one") == drive.tokens("other") == expected


def test_prompts_of_one_call_that_share_only_their_first_token_do_not_wait() -> None:
    drive = Drive(chunk_tokens=2)
    drive.engine.submit(ask("one", [A, *[B] * 9], group="g"))
    drive.engine.submit(ask("other", [A, *[A] * 9], group="g"))
    drive.steps()
    assert drive.has_started("other")


def test_a_short_prompt_waits_only_until_its_own_beginning_was_read() -> None:
    drive = Drive(chunk_tokens=4)
    drive.engine.submit(ask("long", [*SYSTEM, *[A] * 40]))
    drive.engine.submit(ask("short", [*SYSTEM[:8], A + 3]))
    drive.steps(3)
    assert drive.started("short").cached_tokens == 8
    drive.rest()
    assert drive.tokens("short") == solo([*SYSTEM[:8], A + 3], 5)


def test_what_ended_in_a_fault_is_read_again() -> None:
    drive = Drive(chunk_tokens=4)
    drive.runner.poison = tuple(SYSTEM)
    drive.engine.submit(ask("bad", [*SYSTEM, A]))
    drive.rest()
    drive.runner.poison = None
    drive.engine.submit(ask("good", [*SYSTEM, A]))
    drive.rest()
    assert drive.started("good").cached_tokens == 0
    assert drive.tokens("good") == solo([*SYSTEM, A], 5)


def test_without_the_flag_a_full_context_ends_the_request() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", SYSTEM, 150))
    drive.rest()
    assert drive.finished("a").reason is FinishReason.CONTEXT_FULL


def test_a_short_answer_is_not_truncated() -> None:
    drive = Drive(context_shift=True)
    drive.engine.submit(ask("a", SYSTEM, 20))
    drive.rest()
    assert not drive.finished("a").truncated


def test_a_shifted_request_that_is_preempted_is_shifted_again_where_it_was() -> None:
    drive = Drive(context_shift=True, kv_pages=24, num_slots=2)
    prompts = {"older": [*SYSTEM, A], "younger": [B, *SYSTEM]}
    for name, prompt in prompts.items():
        drive.engine.submit(ask(name, prompt, 150))
    drive.rest()
    assert drive.engine.snapshot().counters.preemptions
    for name, prompt in prompts.items():
        assert drive.tokens(name) == shifting(prompt, 150, 64, 1, 0)


def test_what_lies_behind_a_shift_is_used_by_its_own_slot_alone() -> None:
    drive = Drive(context_shift=True)
    drive.engine.submit(ask("a", SYSTEM, 80, slot_id=0))
    drive.rest()
    whole = [*SYSTEM, *drive.tokens("a")]
    # What the slot holds: the first token, and from somewhere on the tail of the sequence.
    held = drive.finished("a").held_tokens
    turn = [SYSTEM[0], *whole[len(whole) - 1 - (held - 1) : -1], B]
    for slot_id, cached in ((1, range(2)), (0, range(held, held + 1))):
        drive.engine.submit(ask(f"b{slot_id}", turn, 1, slot_id=slot_id))
        drive.rest()
        assert drive.started(f"b{slot_id}").cached_tokens in cached


def test_chunks_are_moved_when_a_request_asks_for_it() -> None:
    drive = Drive()
    head, middle, tail = [A] * 5, [B] * 6, [A, B, A, A, B, B, A, B, B, B]
    drive.engine.submit(ask("a", [*head, *middle, *tail], 1, slot_id=0))
    drive.rest()
    drive.engine.submit(ask("plain", [*head, *tail, A], 1, slot_id=1))
    drive.rest()
    assert drive.started("plain").cached_tokens == 5
    drive.engine.submit(ask("moved", [*head, *tail, A], 3, slot_id=0, n_cache_reuse=4))
    drive.rest()
    started = drive.started("moved")
    assert (started.cached_tokens, started.cache_source) == (15, CacheSource.SLOT)
    history = [*head, *map(moved, tail), A]
    logits = model_logits(history, FakeTokenizer().vocab_size)
    logits[1] = -np.inf
    assert drive.tokens("moved")[0] == int(logits.argmax())

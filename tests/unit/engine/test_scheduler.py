from __future__ import annotations

import pytest

from engine.errors import DeadlineExceeded, KvPagesExhausted
from engine.scheduling.row import Arrival
from engine.types import (
    CacheSource,
    CancelCause,
    Cancelled,
    FinishReason,
    SlotState,
)
from tests.unit.engine.drive import A, B, Drive, ask, solo

# One request.


def test_a_request_runs_from_start_to_end() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", max_tokens=4))
    drive.rest()
    started = drive.started("a")
    assert (started.slot_id, started.prompt_tokens, started.cached_tokens) == (1, 3, 0)
    assert started.cache_source is CacheSource.NONE
    assert drive.tokens("a") == solo((A, B, A), 4)
    finished = drive.finished("a")
    assert finished.reason is FinishReason.LENGTH
    assert finished.held_tokens == 3 + 4 - 1


def test_the_same_prompt_again_evaluates_one_token() -> None:
    drive = Drive()
    prompt = [A] * 10
    for name in ("cold", "warm"):
        drive.engine.submit(ask(name, prompt))
        drive.rest()
    assert drive.started("warm").cached_tokens == 9
    assert drive.started("warm").cache_source is CacheSource.SLOT
    assert drive.started("warm").no_reuse == ""
    assert drive.tokens("warm") == drive.tokens("cold")
    counters = drive.engine.snapshot().counters
    assert counters.prompt_tokens_cached + counters.prompt_tokens_evaluated == 20


def test_a_conversation_continues_from_what_is_held() -> None:
    drive = Drive()
    drive.engine.submit(ask("first", [A] * 10, 6))
    drive.rest()
    turn = [*[A] * 10, *drive.tokens("first"), B, B]
    drive.engine.submit(ask("second", turn))
    drive.rest()
    # All but the last sampled token was evaluated and is held.
    assert drive.started("second").cached_tokens == 10 + 6 - 1
    assert drive.tokens("second") == solo(turn, 5)


def test_prompt_caching_off_evaluates_everything() -> None:
    drive = Drive()
    drive.engine.submit(ask("a"))
    drive.rest()
    drive.engine.submit(ask("b", cache_prompt=False))
    drive.rest()
    assert drive.started("b").slot_id == drive.started("a").slot_id
    assert drive.started("b").cached_tokens == 0
    assert drive.tokens("b") == drive.tokens("a")


def test_an_empty_prompt_ends_at_once_and_leaves_the_slot_alone() -> None:
    drive = Drive(num_slots=1)
    drive.engine.submit(ask("full", [A] * 6, 2))
    drive.rest()
    drive.engine.submit(ask("empty", ()))
    drive.rest()
    finished = drive.finished("empty")
    assert finished.reason is FinishReason.EMPTY_PROMPT
    assert (finished.completion_tokens, finished.held_tokens) == (0, 7)
    drive.engine.submit(ask("again", [A] * 6))
    drive.rest()
    assert drive.started("again").cached_tokens == 5


def test_progress_starts_at_the_cache_and_ends_at_the_total() -> None:
    drive = Drive(chunk_tokens=8)
    drive.engine.submit(ask("a", [A] * 20, progress=True))
    drive.rest()
    assert drive.progress("a") == [0, 8, 16, 20]
    drive.engine.submit(ask("b", [A] * 20, progress=True))
    drive.rest()
    assert drive.progress("b") == [19, 20]


def test_times_are_of_the_engines_clock() -> None:
    drive = Drive(chunk_tokens=4)
    drive.engine.submit(ask("a", [A] * 8, 3))
    drive.clock.advance(2.0)
    for _ in range(4):
        drive.steps()
        drive.clock.advance(1.0)
    finished = drive.finished("a")
    assert (finished.queue_s, finished.prefill_s, finished.decode_s) == (2.0, 1.0, 2.0)


# Batching.


def test_requests_share_steps_and_do_not_disturb_each_other() -> None:
    drive = Drive(num_slots=4, chunk_tokens=6)
    prompts = {name: [A, B, ord(name)] * 4 for name in "!#$%"}
    for name, prompt in prompts.items():
        drive.engine.submit(ask(name, prompt, 8))
    drive.rest()
    for name, prompt in prompts.items():
        assert drive.tokens(name) == solo(prompt, 8)
    assert any(len(batch.decodes) > 1 and batch.chunk for batch in drive.runner.batches)


def test_a_long_prompt_does_not_stop_running_answers() -> None:
    drive = Drive(chunk_tokens=4)
    drive.engine.submit(ask("short", max_tokens=20))
    drive.steps(2)
    before = len(drive.tokens("short"))
    drive.engine.submit(ask("long", [B] * 40))
    drive.steps(5)
    assert len(drive.tokens("short")) == before + 5


def test_prompts_are_served_first_come_first() -> None:
    drive = Drive(num_slots=3, chunk_tokens=8)
    for name, prompt in (("long", [B] * 40), ("middle", [A] * 24), ("short", [B + 1] * 16)):
        drive.engine.submit(ask(name, prompt, 9))
    drive.rest()
    firsts = [name for name, event in drive.events if event in drive.chunks(name)[:1]]
    assert firsts == ["long", "middle", "short"]
    # Nobody's chunks lie between another's.
    starts = [batch.chunk.start for batch in drive.runner.batches if batch.chunk]
    assert starts == [*range(0, 40, 8), *range(0, 24, 8), *range(0, 16, 8)]


def test_a_short_prompt_waits_one_chunk_of_a_long_one_and_cannot_starve_it() -> None:
    drive = Drive(num_slots=4, chunk_tokens=8, context_tokens=128, kv_pages=64)
    drive.engine.submit(ask("long", [B] * 80))
    drive.steps(2)
    # A new prompt of one chunk comes with every step, for as long as the long one is read.
    for i in range(20):
        drive.engine.submit(ask(f"short {i}", [i + 3, A, B, A, B], 1))
        drive.steps(1)
    drive.rest()
    assert drive.runner.batches[2].chunk is not None
    assert drive.runner.batches[2].chunk.start == 0, "the first short one has the next chunk"
    # Turn by turn: the long prompt's chunks are every other one, until one completes it too.
    turns = [
        i
        for i, batch in enumerate(drive.runner.batches)
        if batch.chunk
        if B in batch.chunk.tokens[:1]
    ]
    assert turns == [0, 1, *range(3, 17, 2), 16]


def test_a_chunk_is_no_longer_than_the_runner_takes() -> None:
    drive = Drive(chunk_tokens=50, max_chunk=7)
    drive.engine.submit(ask("a", [A] * 20, 1))
    drive.rest()
    lengths = [len(b.chunk.tokens) for b in drive.runner.batches if b.chunk]
    assert lengths == [7, 7, 6]


def test_more_rows_than_the_runner_decodes_all_end() -> None:
    drive = Drive(num_slots=5, max_decodes=2, kv_pages=64)
    for i in range(5):
        drive.engine.submit(ask(f"r{i}", [A, B, 40 + i], 6))
    drive.rest()
    for i in range(5):
        assert drive.tokens(f"r{i}") == solo([A, B, 40 + i], 6)


# Waiting.


def test_64_clients_on_8_slots_all_complete() -> None:
    drive = Drive(num_slots=8, kv_pages=100)
    for i in range(64):
        drive.engine.submit(ask(f"r{i}", [A + i % 7] * (1 + i % 11), 4))
    drive.rest()
    for i in range(64):
        assert drive.tokens(f"r{i}") == solo([A + i % 7] * (1 + i % 11), 4)


def test_a_pinned_request_waits_for_its_slot_and_blocks_nobody() -> None:
    drive = Drive()
    drive.engine.submit(ask("holds 1", max_tokens=20))
    drive.steps()
    assert drive.started("holds 1").slot_id == 1
    drive.engine.submit(ask("wants 1", slot_id=1))
    drive.engine.submit(ask("wants any"))
    drive.steps()
    assert not drive.has_started("wants 1")
    assert drive.started("wants any").slot_id == 0
    drive.rest()
    assert drive.started("wants 1").slot_id == 1


def test_who_waits_for_a_busy_slot_has_no_prompt_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Drive()
    drive.engine.submit(ask("busy", [A] * 5, slot_id=1))
    drive.steps(2)
    for number in range(3):
        drive.engine.submit(ask(f"waits {number}", [B] * 40, slot_id=1))
    drive.steps()
    looked_at: list[str] = []
    tokens = Arrival.tokens

    def watched(arrival: Arrival) -> tuple[int, ...]:
        looked_at.append(arrival.request.request_id)
        return tokens.__get__(arrival)

    monkeypatch.setattr(Arrival, "tokens", property(watched))
    drive.steps(2)
    assert looked_at == []
    drive.rest()
    assert looked_at == ["waits 0", "waits 1", "waits 2"]


def test_a_prompt_that_waits_is_not_copied() -> None:
    request = ask("a", [A] * 40)
    assert Arrival(request, submitted_s=0.0).tokens is request.prompt


def test_a_tenants_flood_does_not_make_another_wait_behind_it() -> None:
    drive = Drive(num_slots=1)
    for i in range(5):
        drive.engine.submit(ask(f"flood{i}", tenant="x", max_tokens=2))
    drive.engine.submit(ask("small", tenant="y", max_tokens=2))
    drive.rest()
    order = [name for name, event in drive.events if event == drive.end(name)]
    assert order.index("small") == 1


def test_a_tenant_never_gets_anothers_cache() -> None:
    drive = Drive(num_slots=1)
    for name, tenant in (("a", "x"), ("b", "y"), ("c", "y")):
        drive.engine.submit(ask(name, [A] * 9, tenant=tenant))
        drive.rest()
    assert drive.started("b").cached_tokens == 0
    assert drive.started("b").no_reuse == "the slot's content is another tenant's"
    assert drive.started("c").cached_tokens == 8


def test_who_waits_for_pages_is_not_overtaken() -> None:
    drive = Drive(num_slots=3, kv_pages=10)
    drive.engine.submit(ask("runs", [A] * 16, 20))
    drive.steps()
    drive.engine.submit(ask("large", [B] * 32))
    drive.engine.submit(ask("small", [B]))
    drive.steps(3)
    assert not drive.has_started("large")
    assert not drive.has_started("small")
    drive.rest()
    order = [name for name, event in drive.events if event == drive.started(name)]
    assert order == ["runs", "large", "small"]


# The pool.


def test_idle_slots_are_evicted_least_recently_used_first() -> None:
    drive = Drive(num_slots=3, kv_pages=9)
    for name, token in (("old", A), ("new", B)):
        drive.engine.submit(ask(name, [token] * 8, 1, slot_id=2 if name == "old" else 1))
        drive.rest()
    drive.engine.submit(ask("large", [99 - 3] * 20, 1, slot_id=0))
    drive.rest()
    slots = drive.engine.snapshot().slots
    assert [slot.held_tokens for slot in slots] == [20, 8, 8]
    drive.engine.submit(ask("larger", [99 - 3] * 28, 1, slot_id=0))
    drive.rest()
    slots = drive.engine.snapshot().slots
    assert [slot.held_tokens for slot in slots] == [28, 8, 0]
    assert drive.engine.snapshot().counters.evicted_slots == 1


def test_a_dry_pool_preempts_the_youngest_and_nobody_can_tell() -> None:
    drive = Drive(num_slots=2, kv_pages=10)
    drive.engine.submit(ask("older", [A] * 8, 25, progress=True))
    drive.engine.submit(ask("younger", [B] * 8, 25, progress=True))
    drive.rest()
    counters = drive.engine.snapshot().counters
    assert counters.preemptions >= 1
    for name, prompt in (("older", [A] * 8), ("younger", [B] * 8)):
        assert drive.tokens(name) == solo(prompt, 25)
        assert [c.completion_tokens for c in drive.chunks(name)] == list(range(1, 26))
        assert drive.progress(name) == [0, 8]
        assert drive.finished(name).held_tokens == 8 + 25 - 1
    assert counters.prompt_tokens_evaluated == 16
    ends = [name for name, event in drive.events if event == drive.end(name)]
    assert ends == ["older", "younger"]


def test_a_preempted_request_resumes_before_any_that_waits() -> None:
    drive = Drive(num_slots=2, kv_pages=10)
    drive.engine.submit(ask("older", [A] * 8, 25))
    drive.engine.submit(ask("younger", [B] * 8, 25))
    drive.engine.submit(ask("waits", [A, A], 1))
    drive.rest()
    assert drive.engine.snapshot().counters.preemptions >= 1
    names = [name for name, _ in drive.events]
    assert names.index("waits") > len(names) - 1 - names[::-1].index("older")
    assert drive.tokens("waits") == solo([A, A], 1)


def test_cancelling_a_preempted_request_ends_it() -> None:
    drive = Drive(num_slots=2, kv_pages=10)
    drive.engine.submit(ask("older", [A] * 8, 25))
    drive.engine.submit(ask("younger", [B] * 8, 25))
    while drive.engine.snapshot().counters.preemptions == 0:
        drive.steps()
    drive.engine.cancel("younger", CancelCause.CLIENT)
    drive.steps()
    assert drive.end("younger") == Cancelled(CancelCause.CLIENT)
    drive.rest()
    assert drive.tokens("older") == solo([A] * 8, 25)


def test_a_lone_request_that_fills_the_pool_ends_with_its_context_full() -> None:
    drive = Drive(num_slots=2, kv_pages=4)
    drive.engine.submit(ask("a", [A] * 5, None))
    drive.rest()
    finished = drive.finished("a")
    assert finished.reason is FinishReason.CONTEXT_FULL
    assert finished.truncated
    assert finished.held_tokens == 16
    assert drive.tokens("a") == solo([A] * 5, 12)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "pages"),
    [(8, None, 3), (9, None, 4), (8, 1, 2), (8, 2, 3), (8, 0, 2), (61, None, 16)],
)
def test_admission_reserves_the_prompt_and_one_page_within_budget_and_context(
    prompt_tokens: int, max_tokens: int | None, pages: int
) -> None:
    drive = Drive(context_tokens=64, chunk_tokens=4)
    drive.engine.submit(ask("a", [A] * prompt_tokens, max_tokens))
    drive.steps()
    assert drive.engine.snapshot().slots[1].pages == pages


def test_a_prompt_that_fills_the_pool_exactly_still_gets_its_token() -> None:
    drive = Drive(kv_pages=4)
    drive.engine.submit(ask("a", [A] * 16, None))
    drive.rest()
    assert drive.tokens("a") == solo([A] * 16, 1)
    assert drive.finished("a").reason is FinishReason.CONTEXT_FULL


def test_what_cannot_fit_alone_is_refused_at_once() -> None:
    drive = Drive(kv_pages=4)
    with pytest.raises(KvPagesExhausted):
        drive.engine.submit(ask("a", [A] * 17))
    assert drive.engine.snapshot().counters.requests_refused == 1


# Cancel and deadline.


def test_a_cancel_while_queued_decoding_or_prefilling_ends_within_a_step() -> None:
    drive = Drive(num_slots=2, chunk_tokens=4)
    drive.engine.submit(ask("decodes", max_tokens=None))
    drive.engine.submit(ask("prefills", [B] * 40))
    drive.engine.submit(ask("waits"))
    drive.steps(4)
    states = {slot.state for slot in drive.engine.snapshot().slots}
    assert states == {SlotState.DECODE, SlotState.PREFILL}
    for name in ("waits", "prefills", "decodes"):
        drive.engine.cancel(name, CancelCause.CLIENT)
    drive.steps()
    for name in ("waits", "prefills", "decodes"):
        assert drive.end(name) == Cancelled(CancelCause.CLIENT)
    now = drive.engine.snapshot()
    assert (now.running, now.queued, now.pools[0].used) == (0, 0, 0)
    assert now.counters.requests_cancelled == 3


def test_a_cancelled_requests_slot_keeps_what_it_evaluated() -> None:
    drive = Drive(chunk_tokens=4)
    drive.engine.submit(ask("a", [B] * 40))
    drive.steps(3)
    drive.engine.cancel("a", CancelCause.CLIENT)
    drive.rest()
    drive.engine.submit(ask("b", [B] * 40))
    drive.rest()
    assert drive.started("b").cached_tokens == 12
    assert drive.tokens("b") == solo([B] * 40, 5)


def test_an_unknown_id_is_ignored() -> None:
    drive = Drive()
    drive.engine.cancel("nobody", CancelCause.CLIENT)
    drive.steps()
    assert drive.events == []


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    drive = Drive(num_slots=1)
    deadline_s = drive.clock() + 1.5
    drive.engine.submit(ask("runs", max_tokens=None, deadline_s=deadline_s))
    drive.engine.submit(ask("waits", deadline_s=deadline_s))
    drive.steps(3)
    assert drive.end("runs") is None
    drive.clock.advance(1.5)
    drive.steps()
    for name in ("runs", "waits"):
        error = drive.error(name)
        assert isinstance(error, DeadlineExceeded)
        assert str(error) == "the deadline of 1.500 s passed"
    drive.rest()
    counters = drive.engine.snapshot().counters
    assert (counters.requests_cancelled, counters.requests_failed) == (2, 0)


def test_a_deadline_in_the_past_never_runs() -> None:
    drive = Drive()
    drive.engine.submit(ask("late", deadline_s=drive.clock() - 1))
    drive.rest()
    assert isinstance(drive.error("late"), DeadlineExceeded)
    assert drive.runner.batches == []


# Books.


def test_lists_show_what_a_slot_does() -> None:
    drive = Drive(num_slots=2, chunk_tokens=4)
    drive.engine.submit(ask("a", [A] * 6, 9))
    drive.steps()
    busy, unused = drive.engine.snapshot().slots[1], drive.engine.snapshot().slots[0]
    assert (unused.task_id, unused.request, unused.held_tokens) == (-1, None, 0)
    assert busy.state is SlotState.PREFILL
    assert (busy.evaluated_tokens, busy.held_tokens, busy.decoded_tokens) == (4, 4, 0)
    drive.steps(2)
    busy = drive.engine.snapshot().slots[1]
    assert busy.state is SlotState.DECODE
    assert (busy.evaluated_tokens, busy.decoded_tokens, busy.remaining_tokens) == (6, 2, 7)
    drive.rest()
    idle = drive.engine.snapshot().slots[1]
    assert idle.state is SlotState.IDLE
    assert (idle.evaluated_tokens, idle.decoded_tokens, idle.remaining_tokens) == (0, 0, -1)
    assert (idle.held_tokens, idle.task_id) == (14, 0)
    assert idle.request is not None
    assert idle.request.request_id == "a"


def test_counters_add_up() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", [A] * 6, 4))
    drive.engine.submit(ask("b", [B] * 6, 4))
    drive.rest()
    counters = drive.engine.snapshot().counters
    assert counters.requests_started == counters.requests_finished == 2
    assert counters.prompt_tokens_evaluated == 12
    assert counters.generated_tokens == 8
    assert counters.max_held_tokens == 9
    assert counters.steps == len(drive.runner.batches)
    assert counters.steps < counters.busy_slot_steps <= 2 * counters.steps


def test_one_call_per_step() -> None:
    drive = Drive(num_slots=4)
    for name in "abcd":
        drive.engine.submit(ask(name, [A, ord(name)], 3))
    drive.rest()
    drive.steps(3)
    assert drive.num_calls == len(drive.runner.batches)

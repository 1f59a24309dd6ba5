from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.pages import OutOfPages, PageAllocator, PoolCorruption
from engine.memory.planner import KvShape, plan_memory, swa_floor
from engine.slots.table import Slot, SlotTable
from engine.slots.window import WindowHeld, WindowPages, WindowPolicy
from engine.types import EngineConfig, SlotState

SLACK = 16


def make_windows(
    window: int, *, page_tokens: int = 4, interval: int = 8, size: int = 64
) -> WindowPages:
    return WindowPages(WindowPolicy(window, page_tokens, interval), PageAllocator(size))


def grown(windows: WindowPages, num_tokens: int) -> WindowHeld:
    held = WindowHeld()
    windows.cover(held, num_tokens)
    windows.trim(held, num_tokens)
    return held


def held_indexes(held: WindowHeld) -> list[int]:
    return [index for index, page_id in enumerate(held.page_ids) if page_id]


# One sequence.


def test_a_sequence_keeps_its_window_and_the_slack() -> None:
    windows = make_windows(8, page_tokens=4, size=64)
    held = WindowHeld()
    windows.cover(held, 100)
    assert held.num_pages == 25
    # Positions from 100 - 8 - 16 = 76 on are kept: page 19 and those behind it.
    assert windows.trim(held, 100) == 19
    assert held_indexes(held) == [19, 20, 21, 22, 23, 24]
    assert windows.num_free == 64 - 6
    assert windows.trim(held, 100) == 0


def test_a_page_is_kept_while_one_of_its_tokens_is() -> None:
    held = grown(make_windows(8, page_tokens=16), 8 + SLACK + 15)
    assert held_indexes(held) == [0, 1, 2]
    held = grown(make_windows(8, page_tokens=16), 8 + SLACK + 16)
    assert held_indexes(held) == [1, 2]


def test_nothing_is_behind_a_window_that_is_not_full() -> None:
    held = grown(make_windows(100), 116)
    assert (held.num_behind, held.num_pages) == (0, 29)


def test_a_trim_is_due_after_the_interval() -> None:
    windows = make_windows(8, interval=8)
    held = grown(windows, 50)
    assert not windows.is_due(held, 57)
    assert windows.is_due(held, 58)
    # A cut starts the count again from its end.
    windows.truncate(held, 49)
    assert not windows.is_due(held, 56)
    assert windows.is_due(held, 57)


# The window is 8: after n tokens the next one sees n - 7 .. n - 1 and itself. What was trimmed at
# 100 tokens begins at position 76.
@pytest.mark.parametrize(
    ("num_tokens", "can"),
    [(100, True), (84, True), (83, True), (82, False), (40, False), (1, False), (0, True)],
)
def test_a_sequence_goes_on_where_its_whole_window_is_held(num_tokens: int, can: bool) -> None:
    windows = make_windows(8, page_tokens=4)
    assert windows.can_continue(grown(windows, 100), num_tokens) == can


def test_nobody_goes_on_past_what_is_held() -> None:
    windows = make_windows(8, page_tokens=4)
    held = grown(windows, 20)
    assert windows.can_continue(held, 20)
    assert not windows.can_continue(held, 21)


def test_a_window_of_one_token_needs_no_history() -> None:
    windows = make_windows(1, page_tokens=4)
    held = grown(windows, 100)
    assert windows.can_continue(held, 40)
    assert not windows.can_continue(held, 41)


def test_a_cut_gives_back_only_what_is_held() -> None:
    windows = make_windows(8, page_tokens=4, size=64)
    held = grown(windows, 100)
    assert windows.truncate(held, 90) == 2
    assert held_indexes(held) == [19, 20, 21, 22]
    assert windows.truncate(held, 10) == 4
    assert (held.page_ids, held.num_behind) == ([0, 0, 0], 3)
    assert windows.truncate(held, 0) == 0
    assert (held.page_ids, held.num_behind, held.trimmed_at) == ([], 0, 0)
    assert windows.num_free == 64


def test_a_refused_cover_takes_nothing() -> None:
    windows = make_windows(8, page_tokens=4, size=3)
    held = WindowHeld()
    windows.cover(held, 8)
    with pytest.raises(OutOfPages):
        windows.cover(held, 17)
    assert (held.num_pages, windows.num_free) == (2, 1)


def test_integrity_finds_leaks_holes_and_pages_kept_too_long() -> None:
    windows = make_windows(8, page_tokens=4, interval=8)
    held = grown(windows, 100)
    windows.check_integrity([(held, 100)])
    with pytest.raises(PoolCorruption, match="0 hold it"):
        windows.check_integrity([])
    with pytest.raises(PoolCorruption, match="25 window pages for 24 pages of tokens"):
        windows.check_integrity([(held, 96)])
    late = grown(windows, 40)
    windows.cover(late, 48)
    with pytest.raises(PoolCorruption, match="behind the window of 48 tokens"):
        windows.check_integrity([(held, 100), (late, 48)])
    late.trimmed_at = 48
    with pytest.raises(PoolCorruption, match="behind the window of 48 tokens"):
        windows.check_integrity([(held, 100), (late, 48)])
    windows.truncate(held, 70)
    windows.trim(late, 48)
    with pytest.raises(PoolCorruption, match="the window of 70 tokens has holes"):
        windows.check_integrity([(held, 70), (late, 48)])


@settings(max_examples=150, deadline=None)
@given(
    window=st.integers(1, 40),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    interval=st.integers(1, 20),
    program=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["grow", "trim", "cut"]), st.integers(0, 60)),
        max_size=40,
    ),
)
def test_any_program_keeps_the_books(
    window: int, page_tokens: int, interval: int, program: list[tuple[int, str, int]]
) -> None:
    """Three sequences against plain sets of page indexes."""
    windows = make_windows(window, page_tokens=page_tokens, interval=interval, size=4000)
    pages = windows.pages
    helds = [WindowHeld() for _ in range(3)]
    lengths = [0, 0, 0]
    expected: list[set[int]] = [set(), set(), set()]
    for i, action, amount in program:
        held = helds[i]
        if action == "grow":
            before, lengths[i] = lengths[i], lengths[i] + amount
            windows.cover(held, lengths[i])
            expected[i] |= set(range(-(-before // page_tokens), -(-lengths[i] // page_tokens)))
        elif action == "trim":
            windows.trim(held, lengths[i])
            # A page goes when its last position is before the first kept one.
            kept = lengths[i] - window - SLACK
            expected[i] = {p for p in expected[i] if (p + 1) * page_tokens > kept}
        else:
            lengths[i] = max(0, lengths[i] - amount)
            windows.truncate(held, lengths[i])
            expected[i] = {p for p in expected[i] if p * page_tokens < lengths[i]}
        assert held_indexes(held) == sorted(expected[i])
        assert held.num_pages == len(expected[i])
        for n in range(max(0, lengths[i] - 3 * window), lengths[i] + 2):
            seen = {position // page_tokens for position in range(max(0, n - window + 1), n)}
            if n % page_tokens:
                seen.add(n // page_tokens)  # the token itself goes there
            is_held = seen <= expected[i] and n <= -(-lengths[i] // page_tokens) * page_tokens
            assert windows.can_continue(held, n) == is_held
        pages.check_integrity([page_id for page_id in one.page_ids if page_id] for one in helds)


# A table of slots whose pool has the floor's size.


def make_table(config: EngineConfig, window: int, training_tokens: int = 1 << 20) -> SlotTable:
    shape = KvShape(1, 1, 8, 8, num_window_layers=1, window=window)
    plan = plan_memory(config, shape, training_tokens)
    assert plan.window is not None
    policy = WindowPolicy(window, plan.page_tokens, plan.window.interval_tokens)
    return SlotTable(
        config.num_slots,
        context_tokens=plan.slot_context_tokens,
        page_tokens=plan.page_tokens,
        pages=PageAllocator(plan.kv_pages * config.num_slots),
        windows=WindowPages(policy, PageAllocator(plan.window.pages)),
    )


def evaluate(table: SlotTable, slot: Slot, num_tokens: int, *, is_chunk: bool) -> None:
    """What the scheduler does around a step that adds so many tokens to a slot."""
    end = len(slot.tokens) + num_tokens
    table.grow(slot, end)
    table.cover(slot, end)
    slot.tokens += [7] * num_tokens
    table.slide(slot, after_chunk=is_chunk)


def serve(table: SlotTable, slot: Slot, prompt_tokens: int, chunk: int, generated: int) -> None:
    slot.state = SlotState.PREFILL
    while len(slot.tokens) < prompt_tokens:
        step = min(chunk, prompt_tokens - len(slot.tokens))
        evaluate(table, slot, step, is_chunk=step > 1)
    for _ in range(generated - 1):
        evaluate(table, slot, 1, is_chunk=False)
    table.release(slot)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_pool_of_the_floors_size_is_never_short(data: st.DataObject) -> None:
    page_tokens = data.draw(st.sampled_from([16, 32, 64]))
    config = EngineConfig(
        context_tokens=data.draw(st.sampled_from([256, 512, 1024])),
        num_slots=data.draw(st.integers(1, 4)),
        page_tokens=page_tokens,
        chunk_tokens=data.draw(st.sampled_from([1, 7, 31, 100, 128, 300, 512])),
        swa_evict_interval=data.draw(st.sampled_from([1, 5, 16, 128, 300])),
    )
    training_tokens = data.draw(st.sampled_from([1 << 20, 100]))
    window = data.draw(st.sampled_from([1, 2, 16, 31, 64, 500, 4096]))
    table = make_table(config, window, training_tokens)
    for _ in range(data.draw(st.integers(1, 60))):
        slot = table.slot(data.draw(st.integers(0, config.num_slots - 1)))
        room = table.context_tokens - len(slot.tokens)
        match data.draw(st.sampled_from(["chunk", "chunk", "decode", "decodes", "end", "again"])):
            case "chunk" if slot.window.trimmed_at == len(slot.tokens) and room:
                slot.state = SlotState.PREFILL
                step = min(room, config.chunk_tokens)
                evaluate(table, slot, step, is_chunk=step > 1)
            case "decode" | "decodes" as action:
                slot.state = SlotState.DECODE
                for _ in range(min(room, 1 if action == "decode" else 140)):
                    evaluate(table, slot, 1, is_chunk=False)
            case "end":
                table.release(slot)
            case "again":
                table.release(slot)
                keep = data.draw(st.integers(0, len(slot.tokens)))
                assert table.windows is not None
                if not table.windows.can_continue(slot.window, keep):
                    keep = 0
                table.truncate(slot, keep)
            case _:
                pass
        table.check_integrity()


@pytest.mark.parametrize(("chunk", "interval"), [(16, 4), (4, 16)])
def test_the_floor_is_no_larger_than_it_must_be(chunk: int, interval: int) -> None:
    # 47 tokens keep positions 15 .. 46; 16 more then lie in pages 0 .. 3.
    config = EngineConfig(
        context_tokens=256,
        num_slots=1,
        page_tokens=16,
        chunk_tokens=chunk,
        swa_evict_interval=interval,
    )
    assert swa_floor(config, 16, 256) == 4
    table = make_table(config, 16)
    slot = table.slot(0)
    slot.state = SlotState.PREFILL
    while len(slot.tokens) < 47:
        evaluate(table, slot, min(chunk, 47 - len(slot.tokens)), is_chunk=True)
    assert slot.window.num_pages == 3
    # One chunk of 16, or 16 decodes, before anything is given back.
    table.cover(slot, 47 + 16)
    assert slot.window.num_pages == 4
    assert table.windows is not None
    assert table.windows.num_free == 0


# What an idle slot can be used for.

CONFIG = EngineConfig(context_tokens=512, num_slots=2, page_tokens=1, chunk_tokens=64)


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_an_idle_slot_holds_its_window_and_the_slack(page_tokens: int) -> None:
    config = dataclasses.replace(CONFIG, page_tokens=page_tokens)
    table = make_table(config, window=32)
    serve(table, table.slot(0), 200, 64, 100)
    # 299 tokens; positions from 299 - 32 - 16 = 251 on.
    assert table.slot(0).window.num_pages == -(-299 // page_tokens) - 251 // page_tokens
    assert table.window_page_use() == (0, table.slot(0).window.num_pages)


def test_eviction_and_truncation_empty_the_window_too() -> None:
    table = make_table(CONFIG, window=32)
    assert table.windows is not None
    size = table.windows.num_free
    for slot in table.slots:
        serve(table, slot, 60, 64, 5)
    table.truncate(table.slot(0), 0)
    assert table.evict_one()
    assert table.windows.num_free == size
    table.check_integrity()

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import NoSuchSlot
from engine.memory.pages import OutOfPages, PageAllocator, PoolCorruption
from engine.slots.table import Slot, SlotTable, common_prefix
from engine.types import Request, SlotState


def make_table(num_slots: int = 4, *, similarity: float = 0.1, size: int = 64) -> SlotTable:
    return SlotTable(
        num_slots,
        context_tokens=256,
        page_tokens=4,
        pages=PageAllocator(size),
        similarity=similarity,
    )


def fill(table: SlotTable, slot_id: int, tokens: Sequence[int], tenant: str = "") -> Slot:
    """Leaves a slot as a request that evaluated `tokens` would."""
    slot = table.slot(slot_id)
    table.truncate(slot, 0)
    table.grow(slot, len(tokens))
    slot.tokens += tokens
    slot.tenant = tenant
    table.release(slot)
    return slot


def choose(
    table: SlotTable, prompt: Sequence[int], tenant: str = "", pinned: int | None = None
) -> int | None:
    slot = table.choose(tuple(prompt), tenant=tenant, pinned=pinned)
    return None if slot is None else slot.slot_id


def test_a_fresh_table_starts_with_the_highest_slot() -> None:
    assert choose(make_table(), [1, 2]) == 3


def test_the_least_recently_used_slot_comes_next() -> None:
    table = make_table(3)
    for slot_id in (2, 0, 1):
        fill(table, slot_id, [slot_id + 10])
    assert choose(table, [99]) == 2


def test_never_used_goes_before_used() -> None:
    table = make_table(2)
    fill(table, 1, [5, 6])
    assert choose(table, [9]) == 0


def test_the_most_similar_slot_wins_over_recency() -> None:
    table = make_table(3)
    fill(table, 0, [1, 2, 3, 4])
    fill(table, 1, [1, 2])
    assert choose(table, [1, 2, 3, 9]) == 0


def test_equal_similarity_goes_to_the_lower_id() -> None:
    table = make_table(3)
    fill(table, 2, [1, 2, 3])
    fill(table, 1, [1, 2, 4])
    assert choose(table, [1, 2, 9, 9]) == 1


def test_similarity_must_exceed_the_limit() -> None:
    table = make_table(2, similarity=0.5)
    fill(table, 1, [1, 2])
    assert choose(table, [1, 2, 3, 4]) == 0
    assert choose(table, [1, 2, 3]) == 1


def test_similarity_zero_turns_the_choice_by_prefix_off() -> None:
    table = make_table(2, similarity=0.0)
    fill(table, 1, [1, 2, 3])
    assert choose(table, [1, 2, 3]) == 0


def test_a_busy_slot_is_not_chosen() -> None:
    table = make_table(2)
    fill(table, 1, [1, 2, 3]).state = SlotState.DECODE
    assert choose(table, [1, 2, 3]) == 0
    table.slot(0).state = SlotState.PREFILL
    assert choose(table, [1, 2, 3]) is None


def test_a_pinned_request_takes_its_slot_or_waits() -> None:
    table = make_table(2)
    fill(table, 1, [1, 2, 3])
    assert choose(table, [1, 2, 3], pinned=0) == 0
    table.slot(0).state = SlotState.DECODE
    assert choose(table, [1, 2, 3], pinned=0) is None
    with pytest.raises(NoSuchSlot):
        choose(table, [1], pinned=2)


def test_another_tenants_content_is_never_matched() -> None:
    table = make_table(2)
    slot = fill(table, 1, [1, 2, 3], tenant="a")
    assert choose(table, [1, 2, 3], tenant="b") == 0
    request = Request("r", (1, 2, 3, 4), tenant="b")
    reuse = table.reuse(slot, request, request.prompt)
    assert (reuse.num_tokens, reuse.no_reuse) == (0, "the slot's content is another tenant's")
    assert choose(table, [1, 2, 3], tenant="a") == 1


# Contract 5.2: the same prompt again leaves one token to evaluate.
@pytest.mark.parametrize(
    ("held", "prompt", "cached"),
    [
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 9, 4], 2),
        ([1, 2, 3], [9, 2, 3], 0),
        ([], [1], 0),
        ([1], [1], 0),
    ],
)
def test_reuse_is_the_common_prefix_but_one(
    held: list[int], prompt: list[int], cached: int
) -> None:
    table = make_table()
    slot = fill(table, 0, held)
    reuse = table.reuse(slot, Request("r", tuple(prompt)), prompt)
    assert reuse.num_tokens == cached
    assert (reuse.no_reuse == "") == (cached > 0)


def test_prompt_caching_can_be_turned_off() -> None:
    table = make_table()
    slot = fill(table, 0, [1, 2, 3])
    request = Request("r", (1, 2, 3), cache_prompt=False)
    assert table.reuse(slot, request, request.prompt).num_tokens == 0


def test_truncation_frees_the_pages_behind_the_cut() -> None:
    pages = PageAllocator(8)
    table = SlotTable(1, context_tokens=64, page_tokens=4, pages=pages)
    slot = fill(table, 0, range(13))
    assert len(slot.pages) == 4
    kept = slot.pages[:2]
    assert table.truncate(slot, 5) == 2
    assert (slot.tokens, slot.pages) == ([0, 1, 2, 3, 4], kept)
    assert table.truncate(slot, 0) == 2
    assert pages.num_free == 8


def test_release_gives_back_what_was_reserved_and_not_used() -> None:
    table = make_table(size=8)
    slot = table.slot(0)
    table.grow(slot, 20)
    slot.tokens += [1, 2, 3]
    table.release(slot)
    assert len(slot.pages) == 1
    table.check_integrity()


def test_growing_past_the_pool_changes_nothing() -> None:
    table = make_table(size=2)
    slot = fill(table, 0, [1])
    with pytest.raises(OutOfPages):
        table.grow(slot, 100)
    assert len(slot.pages) == 1


def test_eviction_takes_the_least_recently_used_idle_slot_that_holds_something() -> None:
    table = make_table(4)
    fill(table, 3, [1])
    fill(table, 0, [2]).state = SlotState.DECODE
    fill(table, 1, [3])
    assert table.evict_one(besides=table.slot(3))
    assert table.slot(1).tokens == []
    assert table.evict_one()
    assert table.slot(3).tokens == []
    assert not table.evict_one()
    assert table.slot(0).tokens == [2]


def test_integrity_finds_a_page_in_two_slots_and_tokens_without_pages() -> None:
    table = make_table(2)
    slot = fill(table, 0, [1, 2])
    table.slot(1).pages += slot.pages
    with pytest.raises(PoolCorruption):
        table.check_integrity()
    table.slot(1).pages.clear()
    slot.tokens += [3, 4, 5]
    with pytest.raises(PoolCorruption, match="slot 0 has 1 pages for 2 pages of tokens"):
        table.check_integrity()


@given(
    shared=st.integers(0, 1600),
    held=st.lists(st.integers(0, 1), max_size=4),
    prompt=st.lists(st.integers(0, 1), max_size=4),
)
def test_common_prefix(shared: int, held: list[int], prompt: list[int]) -> None:
    head = [7] * shared
    expected = 0
    for left, right in zip(head + held, head + prompt, strict=False):
        if left != right:
            break
        expected += 1
    assert common_prefix(head + held, (*head, *prompt)) == expected

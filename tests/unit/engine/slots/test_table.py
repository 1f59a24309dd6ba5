from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import NoSuchSlot
from engine.memory.pages import OutOfPages, PageAllocator, PoolCorruption
from engine.memory.prefix_index import PrefixRoot, encode
from engine.slots.table import Slot, SlotTable, common_prefix
from engine.types import SlotState


def root_of(tenant: str = "") -> PrefixRoot:
    return PrefixRoot(b"", "f16", b"", tenant)


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
    slot.root = root_of(tenant)
    table.release(slot)
    return slot


def choose(
    table: SlotTable, prompt: Sequence[int], tenant: str = "", pinned: int | None = None
) -> int | None:
    slot = table.choose(tuple(prompt), root=root_of(tenant), pinned=pinned)
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
    fill(table, 1, [1, 2, 3], tenant="a")
    assert choose(table, [1, 2, 3], tenant="b") == 0
    assert choose(table, [1, 2, 3], tenant="a") == 1


def test_truncation_frees_the_pages_behind_the_cut_that_the_index_does_not_list() -> None:
    pages = PageAllocator(8)
    table = SlotTable(1, context_tokens=64, page_tokens=4, pages=pages)
    slot = fill(table, 0, range(9))
    table.grow(slot, 13)
    slot.tokens += [9, 10, 11, 12]
    kept = slot.pages[:2]
    assert table.truncate(slot, 5) == 1
    assert (slot.tokens, slot.pages) == ([0, 1, 2, 3, 4], kept)
    assert [node.page_id for node in slot.nodes] == kept[:1]
    assert table.truncate(slot, 0) == 0
    assert (pages.num_free, table.page_use()) == (5, (frozenset(), frozenset()))
    assert table.index.evict(8) == 3
    assert pages.num_free == 8


def test_erasing_frees_what_only_the_slot_held() -> None:
    pages = PageAllocator(16)
    table = SlotTable(2, context_tokens=64, page_tokens=4, pages=pages)
    one = fill(table, 0, [1, 2, 3, 4, 5, 6])
    other = fill(table, 1, [1, 2, 3, 4, 7, 8, 9])
    # The first page is the same, so the second slot took the first one's.
    assert one.pages[0] == other.pages[0]
    assert pages.num_free == 16 - 3
    assert table.erase(one) == 1
    assert (one.tokens, other.tokens) == ([], [1, 2, 3, 4, 7, 8, 9])
    assert table.erase(other) == 2
    assert pages.num_free == 16
    table.check_integrity()


def test_what_a_failed_step_wrote_is_not_listed() -> None:
    table = make_table(1)
    slot = fill(table, 0, [1, 2, 3, 4, 5, 6])
    table.discard(slot, 6)
    assert table.index.match(root_of(), encode([1, 2, 3, 4, 5, 6])).num_tokens == 4
    table.check_integrity()


def test_moved_tokens_are_not_listed() -> None:
    table = make_table(1)
    slot = table.slot(0)
    table.grow(slot, 11)
    slot.tokens += range(11)
    slot.root, slot.marked_from = root_of(), 6
    table.release(slot)
    assert table.index.match(root_of(), encode(range(11))).num_tokens == 4
    table.truncate(slot, 6)
    assert slot.marked_from is None


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


def test_integrity_finds_a_page_that_two_slots_hold_uncounted_and_tokens_without_pages() -> None:
    table = make_table(2)
    slot = fill(table, 0, [1, 2])
    table.slot(1).pages += slot.pages
    with pytest.raises(PoolCorruption, match="counts 2 holders, 3 hold it"):
        table.check_integrity()
    table.slot(1).pages.clear()
    slot.tokens += [3, 4, 5]
    with pytest.raises(PoolCorruption, match="slot 0 has 1 pages for 2 pages of tokens"):
        table.check_integrity()


def test_integrity_finds_a_page_of_two_tenants() -> None:
    pages = PageAllocator(8)
    table = SlotTable(2, context_tokens=64, page_tokens=4, pages=pages)
    one = fill(table, 0, [1, 2], tenant="a")
    pages.share(one.pages)
    other = table.slot(1)
    other.pages += one.pages
    other.tokens += one.tokens
    other.root = root_of("b")
    with pytest.raises(PoolCorruption, match=r"page 1 serves .*'b'.* and .*'a'"):
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

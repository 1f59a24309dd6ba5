from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from engine.memory.pages import SINK_PAGE, OutOfPages, PageAllocator, PoolCorruption


class PoolMachine(RuleBasedStateMachine):
    """Holders come and go; the allocator must agree with a plain list of who holds what."""

    holders: Bundle[tuple[int, ...]] = Bundle("holders")

    @initialize(size=st.integers(1, 12))
    def make(self, size: int) -> None:
        self.pages = PageAllocator(size)
        self.held: list[tuple[int, ...]] = []

    @rule(target=holders, num_pages=st.integers(0, 13))
    def allocate(self, num_pages: int) -> tuple[int, ...]:
        free = self.pages.num_free
        if num_pages > free:
            with pytest.raises(OutOfPages) as refusal:
                self.pages.allocate(num_pages)
            assert (refusal.value.needed, refusal.value.free) == (num_pages, free)
            taken: tuple[int, ...] = ()
        else:
            taken = tuple(self.pages.allocate(num_pages))
            assert len(taken) == num_pages
            assert not set(taken) & {page for pages in self.held for page in pages}
        self.held.append(taken)
        return taken

    @rule(target=holders, pages=holders)
    def share(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        self.pages.share(pages)
        self.held.append(pages)
        return pages

    @rule(pages=consumes(holders))
    def release(self, pages: tuple[int, ...]) -> None:
        self.held.remove(pages)
        still_held = {page for others in self.held for page in others}
        assert self.pages.release(pages) == len(set(pages) - still_held)

    @invariant()
    def books_agree(self) -> None:
        self.pages.check_integrity(self.held)
        in_use = {page for pages in self.held for page in pages}
        assert self.pages.num_free == self.pages.size - len(in_use)
        assert SINK_PAGE not in in_use


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_ids_run_from_one_to_size() -> None:
    assert sorted(PageAllocator(5).allocate(5)) == [1, 2, 3, 4, 5]


def test_a_refused_allocation_takes_nothing() -> None:
    pages = PageAllocator(3)
    with pytest.raises(OutOfPages, match="4 pages needed, 3 free"):
        pages.allocate(4)
    assert pages.num_free == 3


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.share(held)
    assert pages.release(held) == 0
    assert pages.num_holders(held[0]) == 1
    assert pages.release(held) == 1
    assert pages.num_free == 2


def test_a_double_free_changes_nothing() -> None:
    pages = PageAllocator(3)
    first, second = pages.allocate(2)
    with pytest.raises(PoolCorruption, match="released 2 times"):
        pages.release([second, first, first])
    pages.check_integrity([[first, second]])
    pages.release([first])
    with pytest.raises(PoolCorruption):
        pages.release([first])


def test_a_free_page_cannot_be_shared() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    with pytest.raises(PoolCorruption, match="is free"):
        pages.share([held[0], 2])
    assert pages.num_holders(held[0]) == 1


@pytest.mark.parametrize("page_id", [SINK_PAGE, -1, 4])
def test_ids_are_range_checked(page_id: int) -> None:
    pages = PageAllocator(3)
    pages.allocate(3)
    with pytest.raises(PoolCorruption, match=r"outside 1\.\.3"):
        pages.release([page_id])
    with pytest.raises(PoolCorruption):
        pages.share([page_id])


def test_integrity_finds_a_leak_and_an_unknown_holder() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    with pytest.raises(PoolCorruption, match="counts 1 holders, 0 hold it"):
        pages.check_integrity([held[:1]])
    with pytest.raises(PoolCorruption, match="counts 1 holders, 2 hold it"):
        pages.check_integrity([held, held])
    with pytest.raises(PoolCorruption, match="counts 0 holders, 1 hold it"):
        pages.check_integrity([[*held, 3]])


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_needs_a_page(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(size)


def test_a_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(1).allocate(-1)


@given(
    size=st.integers(1, 12),
    times=st.lists(st.integers(0, 3), max_size=12),
    new_size=st.integers(-1, 20),
)
def test_another_size_keeps_holders_in_order(size: int, times: list[int], new_size: int) -> None:
    pages = PageAllocator(size)
    counts = dict(zip(pages.allocate(size), [*times, *[0] * size], strict=False))
    for page_id, count in counts.items():
        pages.share([page_id] * count)
        pages.release([page_id])
    held = {page_id: count for page_id, count in sorted(counts.items()) if count}
    if new_size < max(1, len(held)):
        with pytest.raises(ValueError, match=f"{len(held)} pages are held of a pool of {new_size}"):
            pages.resize(new_size)
        assert pages.held_ids() == list(held)
        return
    ids = pages.resize(new_size)
    assert ids == {old: new for new, old in enumerate(held, 1)}
    pages.check_integrity([[ids[page_id]] * count for page_id, count in held.items()])
    assert (pages.size, pages.num_free) == (new_size, new_size - len(held))
    assert sorted(pages.allocate(pages.num_free)) == list(range(len(held) + 1, new_size + 1))

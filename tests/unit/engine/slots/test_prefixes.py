"""Which prefix a request gets, from where, and what a slot holds then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.errors import KvPagesExhausted
from engine.failpoints import Failpoints
from engine.memory.host_tier import HostTier
from engine.memory.pages import PageAllocator
from engine.memory.prefix_index import PrefixIndex, PrefixRoot
from engine.requests import Request
from engine.scheduling.room import Room
from engine.slots.prefixes import Prefixes, Reuse, prefix_root
from engine.slots.table import Slot, SlotTable
from engine.slots.window import WindowPages, WindowPolicy
from engine.step import SequenceWork, StepBatch
from engine.types import CacheSource, PoolKind, SlotState
from tests.fake_logits import tokens_of
from tests.fake_runner import FakeRunner

PAGE = 4


class Lanes:
    """Slots over a fake device, without a scheduler."""

    def __init__(
        self,
        num_slots: int = 3,
        *,
        size: int = 64,
        window: int | None = None,
        window_size: int = 64,
        host_bytes: int | None = None,
    ) -> None:
        self.pages = PageAllocator(size)
        self.runner = FakeRunner(size, PAGE, window=window, num_window_pages=window_size)
        windows = None
        if window is not None:
            windows = WindowPages(WindowPolicy(window, PAGE, 8), PageAllocator(window_size))
        host = HostTier(self.runner, limit_bytes=host_bytes)
        self.table = SlotTable(
            num_slots,
            context_tokens=256,
            page_tokens=PAGE,
            pages=self.pages,
            windows=windows,
            index=PrefixIndex(self.pages, PAGE, host),
        )
        self.prefixes = Prefixes(self.table, self.pages, self.runner)
        self.room = Room(self.table, self.pages, self.prefixes, Failpoints())

    def find(self, slot_id: int, prompt: Sequence[int], **request: object) -> Reuse:
        asked = Request("r", tuple(prompt), **request)  # pyright: ignore[reportArgumentType]
        return self.prefixes.find(self.table.slot(slot_id), root(asked), asked, prompt)

    def begin(self, slot_id: int, prompt: Sequence[int], **request: object) -> Reuse:
        """Admits a prompt to a slot and checks what the slot holds of it then."""
        slot = self.table.slot(slot_id)
        asked = Request("r", tuple(prompt), **request)  # pyright: ignore[reportArgumentType]
        found = self.prefixes.find(slot, root(asked), asked, prompt)
        reuse = self.room.fit(slot, found, num_tokens=len(prompt))
        assert reuse is not None, "no room"
        self.room.admit(slot, root(asked), reuse, prompt, num_tokens=len(prompt))
        slot.state = SlotState.PREFILL
        assert slot.tokens == list(prompt[: reuse.num_tokens])
        assert self.held(slot) == slot.tokens
        self.table.check_integrity()
        return reuse

    def serve(self, slot_id: int, prompt: Sequence[int], **request: object) -> Reuse:
        """Admits, evaluates and ends."""
        reuse = self.begin(slot_id, prompt, **request)
        slot = self.table.slot(slot_id)
        for token in prompt[reuse.num_tokens :]:
            start = len(slot.tokens)
            self.table.grow(slot, start + 1)
            self.table.cover(slot, start + 1)
            window_pages = tuple(slot.window.page_ids)
            work = SequenceWork([token], start, tuple(slot.pages), False, window_pages)
            self.runner.run(StepBatch((work,), None))
            slot.tokens.append(token)
            self.table.slide(slot, after_chunk=False)
        self.table.release(slot)
        self.table.check_integrity()
        return reuse

    def held(self, slot: Slot) -> list[int]:
        """The tokens that the device has in the slot's pages."""
        found: list[int] = []
        for page_id in slot.pages:
            found += tokens_of(self.runner.read_pages(PoolKind.KV, [page_id]).wait()).tolist()
        return found[: len(slot.tokens)]


def root(request: Request) -> PrefixRoot:
    return prefix_root(request, model=b"m", kv_dtype="f16")


# Contract 5.2: the same prompt again leaves one token to evaluate.
@pytest.mark.parametrize("slot_id", [0, 1])
@pytest.mark.parametrize(
    ("held", "prompt", "cached"),
    [
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 9, 4], 2),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], 6),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], 5),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], 4),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1], [1], 0),
    ],
)
def test_reuse_is_the_common_prefix_but_one(
    held: list[int], prompt: list[int], cached: int, slot_id: int
) -> None:
    lanes = Lanes()
    lanes.serve(0, held)
    reuse = lanes.serve(slot_id, prompt)
    assert reuse.num_tokens == cached
    assert (reuse.no_reuse == "") == (cached > 0)
    if cached:
        assert reuse.source is (CacheSource.SLOT if slot_id == 0 else CacheSource.INDEX)
    # What the other sequence wrote has not changed what was held.
    assert lanes.serve(2, [*held, 8]).num_tokens == len(held)


def test_prompt_caching_can_be_turned_off_by_a_request() -> None:
    lanes = Lanes()
    lanes.serve(0, [1, 2, 3])
    reuse = lanes.find(0, [1, 2, 3], cache_prompt=False)
    assert (reuse.num_tokens, reuse.no_reuse) == (0, "the request turned prompt caching off")
    # What such a request evaluates is there for others.
    lanes.serve(1, [4, 5, 6], cache_prompt=False)
    assert lanes.find(2, [4, 5, 6]).num_tokens == 2


def test_nothing_of_another_tenant_is_reused() -> None:
    lanes = Lanes()
    lanes.serve(0, [1, 2, 3], tenant="a")
    assert lanes.find(0, [1, 2, 3], tenant="b").no_reuse == "the slot's content is another tenant's"
    assert lanes.find(1, [1, 2, 3], tenant="b").no_reuse == "the slot is empty"
    assert lanes.find(1, [1, 2, 3], tenant="a").num_tokens == 2


def test_a_slot_says_why_nothing_is_reused() -> None:
    lanes = Lanes()
    lanes.serve(0, [1, 2, 3])
    assert lanes.find(0, [4, 5]).no_reuse == "the slot shares no prefix with the prompt"


def test_whole_pages_are_shared_and_the_last_is_copied() -> None:
    lanes = Lanes()
    lanes.serve(0, range(10))
    lanes.begin(1, [*range(10), 77])
    one, other = lanes.table.slot(0), lanes.table.slot(1)
    assert other.pages[:2] == one.pages[:2]
    assert other.pages[2] != one.pages[2]
    assert lanes.pages.num_free == 64 - 4


def test_a_slot_that_goes_on_writes_on_in_its_own_page() -> None:
    lanes = Lanes()
    lanes.serve(0, range(10))
    pages = list(lanes.table.slot(0).pages)
    lanes.begin(0, [*range(10), 77])
    assert lanes.table.slot(0).pages == pages


def test_a_slot_that_is_cut_keeps_what_was_behind_the_cut_for_others() -> None:
    lanes = Lanes()
    lanes.serve(0, range(10))
    lanes.serve(0, [0, 1, 2, 3, 4, 99, 98])
    reuse = lanes.serve(1, [*range(10), 5])
    assert (reuse.num_tokens, reuse.source) == (10, CacheSource.INDEX)


def test_what_lost_its_pages_comes_back_from_the_host() -> None:
    lanes = Lanes(1, size=4)
    lanes.serve(0, range(10))
    lanes.serve(0, range(50, 64))
    assert lanes.find(0, range(10)).source is CacheSource.HOST
    reuse = lanes.serve(0, [*range(10), 20, 21])
    assert (reuse.num_tokens, reuse.source) == (10, CacheSource.HOST)


def test_without_a_host_tier_it_is_gone() -> None:
    lanes = Lanes(1, size=4, host_bytes=0)
    lanes.serve(0, range(10))
    lanes.serve(0, range(50, 66))
    assert lanes.find(0, range(10)).num_tokens == 0


def test_where_a_copy_has_no_room_the_whole_pages_are_reused() -> None:
    lanes = Lanes(2, size=5, host_bytes=0)
    lanes.serve(0, range(10))
    # Five pages in all: two shared, and the page to copy from would be the sixth.
    assert lanes.find(0, [*range(9), 90, *range(91, 100)]).num_tokens == 9
    assert lanes.serve(0, [*range(9), 90, *range(91, 100)]).num_tokens == 8


@pytest.mark.parametrize("error", [MemoryError("copy"), RuntimeError("copy")])
def test_a_copy_that_fails_leaves_an_empty_slot_and_whole_books(error: Exception) -> None:
    lanes = Lanes()
    lanes.serve(0, range(10))
    lanes.runner.fail_transfer_with = error
    with pytest.raises(type(error), match="copy"):
        lanes.begin(1, [*range(10), 7])
    assert lanes.table.slot(1).pages == []
    lanes.table.check_integrity()
    assert lanes.serve(1, [*range(10), 7]).num_tokens == 10


@pytest.mark.parametrize("generated", [1, 2, 17, 18, 60, 200])
def test_the_same_prompt_is_reused_under_a_window(generated: int) -> None:
    lanes = Lanes(window=8)
    prompt = list(range(40))
    slot = lanes.table.slot(0)
    lanes.begin(0, prompt)
    lanes.table.truncate(slot, 0)
    slot.state = SlotState.IDLE
    lanes.serve(0, prompt)  # its end is where a prompt ends
    lanes.serve(0, [*prompt, *[50] * (generated - 1)])
    reuse = lanes.serve(0, [*prompt[:39], 60])
    assert reuse.num_tokens == 39
    assert lanes.serve(1, [*prompt[:39], 61]).num_tokens == 39


def test_under_a_window_a_prefix_without_a_checkpoint_is_refused_and_says_so() -> None:
    lanes = Lanes(window=8)
    lanes.serve(0, range(90))
    for slot_id in (0, 1):
        reuse = lanes.find(slot_id, [*range(40), 99])
        assert (reuse.num_tokens, reuse.no_reuse) == (
            0,
            "the window before token 40 is no longer held",
        )


def test_checkpoints_make_room_for_running_windows() -> None:
    lanes = Lanes(window=8, window_size=27)
    for turn in range(12):
        lanes.serve(turn % 3, [turn, *range(20 + turn)])
    windows = lanes.table.windows
    assert windows is not None
    assert 0 < len(lanes.table.checkpoints) < 12


def restored(lanes: Lanes, tokens: list[int], slot_id: int) -> None:
    """Carries slot 0's state through the host into pages of another slot, and erases slot 0."""
    source, slot = lanes.table.slot(0), lanes.table.slot(slot_id)
    taken = lanes.room.reserve(-(-len(tokens) // PAGE), 0, slot, may_evict=True)
    assert taken is not None
    for old, new in zip(source.pages, taken.pages, strict=True):
        content = lanes.runner.read_pages(PoolKind.KV, [old]).wait()
        lanes.runner.write_pages(PoolKind.KV, [new], content)
    lanes.table.erase(source)
    lanes.table.adopt(slot, root(Request("r", ())), tokens, taken.pages)
    lanes.table.check_integrity()


def test_a_state_that_was_put_into_pages_is_found_like_any_other() -> None:
    lanes = Lanes()
    tokens = list(range(10))
    lanes.serve(0, tokens)
    lanes.serve(1, range(50, 60))
    restored(lanes, tokens, 1)
    assert lanes.find(1, tokens).num_tokens == 9
    assert lanes.serve(2, [*tokens, 3]).num_tokens == 10
    # What the slot held before is still listed.
    assert lanes.serve(0, [*range(50, 60), 3]).num_tokens == 10


def test_a_slots_own_prefix_goes_before_one_that_is_less_than_a_page_longer() -> None:
    lanes = Lanes()
    lanes.serve(0, range(40))
    lanes.serve(1, [*range(20), *range(60, 70)])
    own = lanes.find(1, range(20 + PAGE))
    assert (own.num_tokens, own.is_own) == (20, True)
    listed = lanes.find(1, range(21 + PAGE))
    assert (listed.num_tokens, listed.is_own) == (20 + PAGE, False)


def test_pages_for_a_state_are_not_taken_from_others_unasked() -> None:
    lanes = Lanes(size=4)
    lanes.serve(0, range(10))
    slot = lanes.table.slot(1)
    assert lanes.room.reserve(2, 0, slot, may_evict=False) is None
    assert lanes.table.slot(0).tokens
    taken = lanes.room.reserve(2, 0, slot, may_evict=True)
    assert taken is not None
    assert len(taken.pages) == 2
    lanes.table.hold(taken.pages)
    with pytest.raises(KvPagesExhausted):
        lanes.room.reserve(9, 0, slot, may_evict=True)


def test_a_long_prompt_has_a_checkpoint_now_and_then() -> None:
    lanes = Lanes(1, size=600, window=8, window_size=400)
    slot = lanes.table.slot(0)
    slot.root = root(Request("r", ()))
    for end in range(100, 2300, 100):
        lanes.table.grow(slot, end)
        lanes.table.cover(slot, end)
        slot.tokens += range(len(slot.tokens), end)
        lanes.table.slide(slot, after_chunk=True)
        lanes.table.register(slot, is_end=False)
    positions = [
        checkpoint.position for checkpoint in lanes.table.checkpoints_of(slot, before=3000)
    ]
    assert positions == [1100, 2200]

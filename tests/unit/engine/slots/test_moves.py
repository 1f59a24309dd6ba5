from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.slots.moves import moved_chunks
from engine.types import CacheSource
from tests.fake_logits import moved
from tests.unit.engine.slots.test_prefixes import Lanes


def peer_chunks(held: Sequence[int], prompt: Sequence[int], start: int, least: int) -> list[int]:
    """The peer's rule, token by token."""
    found: list[int] = []
    at = start
    while at < len(held) and start + len(found) < len(prompt):
        run = 0
        while (
            at + run < len(held)
            and start + len(found) + run < len(prompt)
            and held[at + run] == prompt[start + len(found) + run]
        ):
            run += 1
        if run >= least:
            found += range(at, at + run)
            at += run
        else:
            at += 1
    return found


@given(
    held=st.lists(st.integers(0, 1), max_size=14),
    prompt=st.lists(st.integers(0, 1), max_size=14),
    start=st.integers(0, 4),
    least=st.integers(1, 4),
)
def test_chunks_are_the_peers(held: list[int], prompt: list[int], start: int, least: int) -> None:
    start = min(start, len(held), len(prompt))
    assert moved_chunks(held, prompt, start=start, least=least) == peer_chunks(
        held, prompt, start, least
    )


SEQUENCE = list(range(20))


def shifted(lanes: Lanes, first: int, drop: int) -> list[int]:
    """Slot 0 with `drop` tokens less; returns what the device must hold then."""
    slot = lanes.table.slot(0)
    assert lanes.room.move(slot, first, range(first + drop, len(slot.tokens)))
    lanes.table.check_integrity()
    assert slot.tokens == [*SEQUENCE[:first], *SEQUENCE[first + drop :]]
    return [*SEQUENCE[:first], *map(moved, SEQUENCE[first + drop :])]


@pytest.mark.parametrize(("first", "drop"), [(0, 1), (1, 7), (4, 4), (5, 3), (7, 10), (17, 2)])
def test_what_is_left_out_is_closed_up_and_others_keep_what_they_had(first: int, drop: int) -> None:
    lanes = Lanes()
    lanes.serve(0, SEQUENCE)
    expected = shifted(lanes, first, drop)
    assert lanes.held(lanes.table.slot(0)) == expected
    # The pages were listed, and still hold what they are listed with.
    assert lanes.serve(1, [*SEQUENCE, 50]).num_tokens == 20
    # What was moved is nobody else's.
    assert lanes.table.slot(0).marked_from == first
    lanes.table.release(lanes.table.slot(0))
    lanes.table.erase(lanes.table.slot(1))
    assert lanes.find(2, [*lanes.table.slot(0).tokens, 50]).num_tokens <= first + 1
    assert lanes.find(0, [*lanes.table.slot(0).tokens, 50]).num_tokens == 20 - drop


def test_without_a_free_page_a_slot_writes_over_its_own() -> None:
    lanes = Lanes(size=5, host_bytes=0)
    lanes.serve(0, SEQUENCE)
    assert lanes.pages.num_free == 0
    expected = shifted(lanes, 2, 6)
    assert lanes.held(lanes.table.slot(0)) == expected
    assert lanes.find(1, SEQUENCE).num_tokens == 0


def test_pages_of_another_slot_are_never_written() -> None:
    lanes = Lanes(size=9, host_bytes=0)
    lanes.serve(0, SEQUENCE)
    lanes.begin(1, [*SEQUENCE, 50, 51])
    expected = shifted(lanes, 1, 9)
    assert lanes.held(lanes.table.slot(0)) == expected
    assert lanes.held(lanes.table.slot(1)) == SEQUENCE


def test_a_move_that_running_rows_leave_no_page_for_is_refused() -> None:
    lanes = Lanes(size=7, host_bytes=0)
    lanes.serve(0, SEQUENCE)
    lanes.begin(1, [*SEQUENCE, 50, 51, 52, 53, 54])
    slot = lanes.table.slot(0)
    assert not lanes.room.move(slot, 1, range(10, 20))
    assert slot.tokens == SEQUENCE
    lanes.table.check_integrity()


def test_a_move_that_fails_leaves_whole_books() -> None:
    lanes = Lanes()
    lanes.serve(0, SEQUENCE)
    slot = lanes.table.slot(0)
    lanes.runner.fail_transfer_with = MemoryError("move")
    with pytest.raises(MemoryError, match="move"):
        lanes.room.move(slot, 4, range(10, 20))
    lanes.table.discard(slot, 0)
    lanes.table.check_integrity()


# n_cache_reuse.


def test_chunks_that_a_slot_holds_elsewhere_are_moved() -> None:
    lanes = Lanes()
    lanes.serve(0, SEQUENCE)
    prompt = [*SEQUENCE[:3], *SEQUENCE[6:14], 60, *SEQUENCE[14:17], 61]
    reuse = lanes.find(0, prompt, n_cache_reuse=4)
    assert (reuse.total, reuse.num_tokens, reuse.source) == (11, 3, CacheSource.SLOT)
    slot = lanes.table.slot(0)
    fitting = lanes.room.fit(slot, reuse, num_tokens=len(prompt))
    assert fitting is reuse
    assert slot.root is not None
    lanes.room.admit(slot, slot.root, reuse, prompt, num_tokens=len(prompt))
    assert slot.tokens == prompt[:11]
    assert lanes.held(slot) == [*SEQUENCE[:3], *map(moved, SEQUENCE[6:14])]
    lanes.table.release(slot)
    lanes.table.check_integrity()
    # Others find what was evaluated, and nothing that was moved.
    assert lanes.find(1, [*SEQUENCE, 9]).num_tokens == 20
    assert lanes.find(1, prompt).num_tokens == 3


def test_chunks_are_not_moved_where_they_cannot_be() -> None:
    lanes = Lanes()
    lanes.serve(0, SEQUENCE)
    lanes.runner.can_move_tokens = False
    assert lanes.find(0, [0, 1, *SEQUENCE[5:]], n_cache_reuse=1).total == 2


def test_one_token_of_a_moved_prompt_is_left_to_evaluate() -> None:
    lanes = Lanes()
    lanes.serve(0, SEQUENCE)
    assert lanes.find(0, [0, 1, *SEQUENCE[5:12]], n_cache_reuse=2).total == 8


def test_without_room_for_a_move_the_prefix_is_reused() -> None:
    lanes = Lanes(size=6, host_bytes=0)
    lanes.serve(0, SEQUENCE)
    prompt = [*SEQUENCE[:5], *SEQUENCE[8:14]]
    reuse = lanes.begin(0, prompt, n_cache_reuse=2)
    assert (reuse.num_tokens, reuse.moved) == (4, ())

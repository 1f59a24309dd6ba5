"""Which experts are in memory: a model of the rules beside it, and what a failed read leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidField
from engine.memory.expert_store import ExpertShape, ExpertStore

SHAPE = ExpertShape(num_layers=3, num_experts=6, top_k=2, slot_bytes=64, num_parts=2)


def write_name(layer: int, expert: int, part: int, target: npt.NDArray[np.uint8]) -> None:
    """A record is its own name, in two halves."""
    target[32 * part : 32 * part + 32] = 16 * layer + expert + 1


def make(num_slots: int, *, overlaps: bool = False) -> ExpertStore:
    store = ExpertStore(SHAPE, write_name, overlaps=overlaps)
    store.take(np.zeros((num_slots, SHAPE.slot_bytes), np.uint8))
    return store


def step(store: ExpertStore, layer: int, experts: Sequence[int], *, is_long: bool = False) -> None:
    """What kernels do: note the uses, then ask."""
    store.count_uses(layer, np.array([experts], np.int32))
    store.ensure(layer, sorted(set(experts)), is_long=is_long)


def held(store: ExpertStore) -> dict[tuple[int, int], int]:
    """Slot by (layer, expert), after looking at what each slot holds."""
    places = {
        (int(layer), int(expert)): int(store.slot_of[layer, expert])
        for layer, expert in np.argwhere(store.slot_of >= 0)
    }
    assert len(set(places.values())) == len(places) == store.used
    for (layer, expert), slot in places.items():
        assert set(store.slots[slot].tolist()) == {16 * layer + expert + 1}
    return places


@settings(max_examples=150)
@given(
    num_slots=st.integers(6, 18),
    steps=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=40),
    overlaps=st.booleans(),
)
def test_what_a_step_needs_is_there_and_slots_hold_what_they_say(
    num_slots: int, steps: list[list[int]], overlaps: bool
) -> None:
    store = make(num_slots, overlaps=overlaps)
    for number, experts in enumerate(steps):
        layer = number % SHAPE.num_layers
        step(store, layer, experts, is_long=len(experts) >= SHAPE.num_experts)
        assert all(store.slot_of[layer, expert] >= 0 for expert in experts)
        if not store.counts[2]:
            assert len(held(store)) <= num_slots
    store.ensure(0, [0], is_long=False)
    held(store)
    figures = store.figures
    assert figures.lookups == figures.hits + figures.loads
    store.close()


def test_the_least_used_goes_first_and_old_uses_count_less() -> None:
    store = make(9)
    # 128 tokens halve a use: 3 of long ago are less than 1 of now.
    for _ in range(3):
        step(store, 0, [0])
    step(store, 0, [1])
    store.clock *= 2.0**4
    step(store, 0, [2])
    for expert in range(6):
        step(store, 1, [expert])
    assert store.used == 9
    step(store, 0, [3])
    assert (0, 1) not in held(store)
    step(store, 0, [4])
    assert (0, 0) not in held(store)
    assert (0, 2) in held(store)


def test_of_equally_used_experts_the_longest_held_goes_first() -> None:
    store = make(6)
    store.clock[0] = 0.0  # nothing counts
    for expert in (3, 1, 4, 0, 5, 2):
        step(store, 0, [expert])
    step(store, 1, [0])
    assert (0, 3) not in held(store)


def test_other_layers_keep_a_fair_share() -> None:
    store = make(9)
    for layer in range(3):
        step(store, layer, [0, 1])
    for _ in range(5):
        step(store, 2, [2, 3])
        step(store, 2, [4, 5])
    # min(top_k, 9 // 3) of each other layer stay, however seldom they are used.
    layers = [layer for layer, _ in held(store)]
    assert [layers.count(layer) for layer in range(3)] == [2, 2, 5]


def test_a_whole_layer_fits_at_the_floor_whatever_is_fair() -> None:
    store = make(SHAPE.floor)
    for layer in (0, 1, 2, 0):
        step(store, layer, range(6), is_long=True)
        assert set(held(store)) == {(layer, expert) for expert in range(6)}
    assert store.figures.loads == 24


def test_a_long_step_reads_the_next_layer_ahead_if_there_are_two_layers_of_slots() -> None:
    for num_slots, wanted in ((12, 6), (11, 0)):
        store = make(num_slots, overlaps=True)
        step(store, 0, range(6), is_long=True)
        step(store, 1, range(6), is_long=True)
        step(store, 2, range(6), is_long=True)
        assert store.figures.loads_ahead == 2 * wanted
        assert store.figures.loads == 18 - 2 * wanted
        assert store.overlaps == (wanted > 0)
        store.close()


def test_what_a_layer_computes_with_is_not_taken_for_the_next_one() -> None:
    store = make(12, overlaps=True)
    for _ in range(9):
        step(store, 2, range(6))
    step(store, 0, range(6), is_long=True)
    running = store.slot_of[0].tolist()
    store.ensure(1, range(6), is_long=False)
    # Layer 0 is used least, and its slots are being read by its products.
    assert store.figures.loads_ahead == 6
    assert store.slot_of[0].tolist() == running
    store.close()


@pytest.mark.parametrize("bad_part", [0, 1])
@pytest.mark.parametrize("experts", [[3], [3, 4]])
def test_a_failed_read_is_raised_and_loses_no_slot(experts: list[int], bad_part: int) -> None:
    fails = True

    def read(layer: int, expert: int, part: int, target: npt.NDArray[np.uint8]) -> None:
        if fails and expert == 3 and part == bad_part:
            raise OSError("the disk is gone")
        write_name(layer, expert, part, target)

    store = ExpertStore(SHAPE, read)
    store.take(np.zeros((6, SHAPE.slot_bytes), np.uint8))
    step(store, 0, [0, 1, 2])
    with pytest.raises(OSError, match="the disk is gone"):
        step(store, 0, experts)
    fails = False
    step(store, 0, range(6))
    assert len(held(store)) == 6


def test_an_expert_that_cannot_be_read_ahead_fails_only_who_needs_it() -> None:
    def read(layer: int, expert: int, part: int, target: npt.NDArray[np.uint8]) -> None:
        if (layer, expert) == (1, 4):
            raise OSError("the disk is gone")
        write_name(layer, expert, part, target)

    store = ExpertStore(SHAPE, read)
    store.take(np.zeros((12, SHAPE.slot_bytes), np.uint8))
    for _ in range(2):
        store.ensure(0, [0, 1], is_long=True)
        store.ensure(1, [0, 1, 5], is_long=False)
    assert {(1, 0), (1, 1), (1, 5)} <= set(held(store))
    assert store.figures.loads_ahead == 4, "those before the one that failed"
    with pytest.raises(OSError, match="the disk is gone"):
        store.ensure(1, [0, 4], is_long=False)
    store.close()


def test_a_clock_that_has_run_long_starts_anew() -> None:
    store = make(6)
    step(store, 0, [0])
    store.clock[0] = 1e151
    step(store, 0, [1, 1])
    assert store.clock[0] == 1.0
    assert store.uses[0, 0] < 1e-100
    assert store.uses[0, 1] == 2.0


@pytest.mark.parametrize("num_slots", [0, 5, 19, 1 << 40])
def test_a_size_out_of_range_is_refused_with_both_limits(num_slots: int) -> None:
    message = rf"must be 6 \(one layer's experts\) to 18 \(all of them\), got {num_slots}"
    with pytest.raises(InvalidField, match=message):
        SHAPE.checked(num_slots)


def test_other_slots_hold_what_they_are_said_to_and_uses_are_not_forgotten() -> None:
    store = make(9)
    for layer, expert in [(0, 3), (1, 3), (2, 5), (0, 0), (2, 5), (0, 0), (1, 1)]:
        step(store, layer, [expert])
    # Two used twice, the later one first, and of those used once the last.
    most = store.most_used(3)
    assert most == [(0, 0), (2, 5), (1, 1)]
    assert len(store.most_used(99)) == 5
    uses = store.uses.copy()
    slots = np.zeros((6, SHAPE.slot_bytes), np.uint8)
    for slot, (layer, expert) in enumerate(most):
        for part in range(2):
            write_name(layer, expert, part, slots[slot])
    store.take(slots, most)
    assert set(held(store)) == set(most)
    np.testing.assert_array_equal(store.uses, uses)
    step(store, 0, range(6))
    assert len(held(store)) == 6


def test_with_all_in_memory_those_of_all_layers_take_turns() -> None:
    store = make(6, overlaps=True)
    store.take_all()
    assert store.used == store.num_slots == SHAPE.ceiling
    assert not store.overlaps
    assert store.most_used(4) == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_what_was_read_ahead_is_there_before_slots_change() -> None:
    store = make(12, overlaps=True)
    step(store, 0, range(6), is_long=True)
    store.settle()
    assert store.used == 12
    assert store.counts[2] == 0

from __future__ import annotations

import pytest

from engine.memory.checkpoint import Checkpoint
from engine.memory.pages import PoolCorruption
from engine.slots.states import RecurrentStates


def test_every_slot_has_a_state_of_its_own() -> None:
    states = RecurrentStates(5, num_slots=3, interval_tokens=8)
    assert {states.own(slot) for slot in range(3)} == {1, 2, 3}
    assert (states.size, states.num_free, states.num_snapshots) == (5, 2, 0)


def test_fewer_states_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="2 states for 3 slots"):
        RecurrentStates(2, num_slots=3, interval_tokens=8)


def test_the_oldest_snapshot_makes_room_for_the_next() -> None:
    states = RecurrentStates(3, num_slots=1, interval_tokens=8)
    kept = [Checkpoint(n, lowest=n, state_id=states.take() or 0) for n in (5, 6)]
    for checkpoint in kept:
        states.checkpoints.add(checkpoint)
        checkpoint.owner = [checkpoint]
    states.checkpoints.touch(kept[0])
    assert states.take() == kept[1].state_id
    assert states.num_snapshots == 2
    states.check_integrity([kept[0].state_id, kept[1].state_id])


def test_a_state_that_is_kept_for_somebody_makes_no_room() -> None:
    states = RecurrentStates(2, num_slots=1, interval_tokens=8)
    kept = Checkpoint(5, lowest=5, state_id=states.take() or 0)
    states.checkpoints.add(kept)
    assert states.take() is None
    states.check_integrity([kept.state_id])


def test_a_slot_can_take_over_another_state() -> None:
    states = RecurrentStates(3, num_slots=2, interval_tokens=8)
    other = states.take()
    assert other is not None
    assert states.swap(1, other) == 2
    assert (states.own(1), states.held_ids()) == (other, [1, 2, 3])
    states.give_back(2)
    states.check_integrity([])


def test_without_any_to_spare_there_is_none() -> None:
    assert RecurrentStates(2, num_slots=2, interval_tokens=8).take() is None


def test_a_state_that_nobody_holds_is_found() -> None:
    states = RecurrentStates(3, num_slots=1, interval_tokens=8)
    states.take()
    with pytest.raises(PoolCorruption):
        states.check_integrity([])


@pytest.mark.parametrize(
    ("start", "prompt", "stop"),
    [
        (0, 20, 8),
        (7, 20, 8),
        (8, 20, 16),
        (16, 20, 19),
        (18, 20, 19),
        (19, 20, None),
        (0, 9, 8),
        (0, 8, 7),
        (0, 2, 1),
        (0, 1, None),
        (0, 0, None),
        (30, 20, None),
    ],
)
def test_prompts_stop_at_intervals_and_one_token_before_their_end(
    start: int, prompt: int, stop: int | None
) -> None:
    assert RecurrentStates(1, num_slots=1, interval_tokens=8).next_stop(start, prompt) == stop

from __future__ import annotations

import pytest

from engine.errors import QueueFull
from service.waiting_room import WaitingRoom


def test_calls_and_bytes_are_bounded_and_a_place_is_given_back() -> None:
    room = WaitingRoom(max_calls=2, max_bytes=10)
    with room.place(4), room.place(6):
        assert room.num_calls == 2
        with pytest.raises(QueueFull) as full, room.place(0):
            pass
        assert (full.value.queued, full.value.limit) == (2, 2)
    with room.place(4), pytest.raises(QueueFull) as full, room.place(7):
        pass
    assert (full.value.queued, full.value.limit) == (11, 10)
    with pytest.raises(RuntimeError), room.place(10):
        raise RuntimeError
    assert room.num_calls == 0
    with room.place(10):
        assert room.num_calls == 1

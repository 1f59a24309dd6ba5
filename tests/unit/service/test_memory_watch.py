from __future__ import annotations

import pytest

from service.memory_watch import resident_bytes, watch_memory

_MIB = 1 << 20


class Enough(Exception):
    """Ends what never ends by itself."""


class Memory:
    """A process whose memory is what the next entry says; `num_trims` are those asked for so far."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = list(sizes)
        self.size = self._sizes.pop(0) * _MIB
        self.num_trims = 0

    async def sleep(self, seconds: float) -> None:
        if not self._sizes:
            raise Enough
        self.size = self._sizes.pop(0) * _MIB

    def trim(self) -> None:
        self.num_trims += 1


async def trims_of(*sizes: int) -> int:
    memory = Memory(*sizes)
    with pytest.raises(Enough):
        await watch_memory(memory.trim, resident=lambda: memory.size, sleep=memory.sleep)
    return memory.num_trims


async def test_what_grows_little_is_left_alone() -> None:
    assert await trims_of(500, 520, 532, 510) == 0


async def test_what_has_grown_is_given_back_for_a_while_and_then_again() -> None:
    assert await trims_of(500, 600, 600, 600) == 3
    assert await trims_of(500, *[600] * 50) == 20
    assert await trims_of(500, *[600] * 50, *[650] * 50) == 40


async def test_growth_counts_from_the_least() -> None:
    assert await trims_of(500, 480, 510, 513) == 1


async def test_where_the_system_does_not_tell_nothing_is_watched() -> None:
    await watch_memory(lambda: None, resident=lambda: None)


def test_this_process_has_memory() -> None:
    size = resident_bytes()
    assert size is None or size > _MIB

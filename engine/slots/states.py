"""States of recurrent layers: one for each slot, and snapshots of sequences at earlier positions.

A slot's own state is always that of all its tokens. It can be cut back only to a snapshot, which is
a checkpoint in the prefix index, or to what was kept for it on a shelf. Knows state numbers only; the pool always has one for every slot,
and what it has beyond them are snapshots, the least recently used of which makes room.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.checkpoint import Checkpoints
from engine.memory.pages import PageAllocator


class RecurrentStates:
    """The mamba pool as slots use it."""

    def __init__(self, size: int, num_slots: int, interval_tokens: int) -> None:
        """Makes a pool of `size` usable states; prompts get a snapshot every `interval_tokens`.

        Raises:
            ValueError: `size` is less than one for every slot.
        """
        if size < num_slots:
            raise ValueError(f"{size} states for {num_slots} slots")
        self._pages = PageAllocator(size)
        self._own = self._pages.allocate(num_slots)
        self._interval = interval_tokens
        self.checkpoints = Checkpoints(None, self.give_back)

    @property
    def size(self) -> int:
        """Usable states."""
        return self._pages.size

    @property
    def num_free(self) -> int:
        """States that are neither a slot's nor a snapshot."""
        return self._pages.num_free

    @property
    def num_snapshots(self) -> int:
        """Snapshots held."""
        return self.size - len(self._own) - self.num_free

    def own(self, slot_id: int) -> int:
        """Returns the state of a slot."""
        return self._own[slot_id]

    def swap(self, slot_id: int, state_id: int) -> int:
        """Gives a slot another state that was taken; returns its old one, which is taken now."""
        old, self._own[slot_id] = self._own[slot_id], state_id
        return old

    def held_ids(self) -> list[int]:
        """Returns the states that are a slot's or a snapshot, rising."""
        return self._pages.held_ids()

    def resize(self, size: int) -> dict[int, int]:
        """As `PageAllocator.resize`, for the states; there must still be one for every slot."""
        ids = self._pages.resize(size)
        self._own = [ids[state_id] for state_id in self._own]
        return ids

    def next_stop(self, start: int, prompt_tokens: int) -> int | None:
        """Returns the next position after `start` at which a prompt gets a snapshot, if any.

        One token before its end, so that the same prompt again evaluates one token, and every
        interval before that.
        """
        last = prompt_tokens - 1
        if start >= last:
            return None
        return min(last, (start // self._interval + 1) * self._interval)

    def take(self) -> int | None:
        """Takes a state for a snapshot, from the oldest one if none is free; None without any."""
        if not self.num_free and not self.checkpoints.drop_oldest_state():
            return None
        return self._pages.allocate(1)[0]

    def give_back(self, state_id: int) -> None:
        """Frees a state that was taken and is no snapshot."""
        self._pages.release([state_id])

    def check_integrity(self, snapshots: Sequence[int]) -> None:
        """Proves that `snapshots` and the slots' own explain every state that is held.

        Raises:
            PoolCorruption: a state leaked or serves two.
        """
        self._pages.check_integrity([self._own, snapshots])

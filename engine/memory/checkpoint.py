"""A sequence checkpoint: what a sequence can be continued from, where its pages alone do not do.

Pages of full-attention layers serve any position that they cover. Layers with a window see only
their last tokens, and recurrent layers only one state, so a sequence of such a model can be cut
back only to where a checkpoint of these was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.memory.pages import PageAllocator


@dataclass(eq=False)
class Checkpoint:
    """Continues its sequence at any position from `lowest` to `position` tokens.

    `window_pages` are held by reference; the first one covers the positions from
    `first_page * page_tokens` on. `state_id` names a snapshot of the recurrent layers at exactly
    `position` tokens (0: none), which makes `lowest` the same.
    """

    position: int
    lowest: int
    first_page: int = 0
    window_pages: tuple[int, ...] = ()
    state_id: int = 0
    owner: list[Checkpoint] = field(default_factory=list["Checkpoint"], repr=False)
    on_drop: Callable[[Checkpoint], None] | None = field(default=None, repr=False)

    def at(self, num_tokens: int) -> int:
        """Returns where to continue a sequence that agrees in `num_tokens`; 0 is nowhere."""
        position = min(self.position, num_tokens)
        return position if position >= self.lowest else 0

    def drop(self) -> None:
        """Gives back what it holds and leaves its page's list."""
        if self in self.owner:
            self.owner.remove(self)
        if self.on_drop is not None:
            self.on_drop(self)


class Checkpoints:
    """Every checkpoint of an engine, least recently used first."""

    def __init__(
        self, windows: PageAllocator | None, release_state: Callable[[int], None] | None = None
    ) -> None:
        """`windows` is the swa pool; `release_state` gives a snapshot's unit back."""
        self._windows = windows
        self._release_state = release_state
        self._all: dict[Checkpoint, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, checkpoint: object) -> bool:
        return checkpoint in self._all

    def all(self) -> list[Checkpoint]:
        """Returns every checkpoint that still holds something."""
        return list(self._all)

    def add(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint; its window pages get one holder more, its state becomes ours."""
        if self._windows is not None:
            self._windows.share(checkpoint.window_pages)
        checkpoint.on_drop = self._forget
        self._all[checkpoint] = None

    def touch(self, checkpoint: Checkpoint) -> None:
        """Counts a checkpoint as used now; one that was dropped stays so."""
        if checkpoint in self._all:
            del self._all[checkpoint]
            self._all[checkpoint] = None

    def reclaim(self, num_free: int) -> bool:
        """Drops the oldest until so many window pages are free; False if that cannot be."""
        assert self._windows is not None
        for checkpoint in list(self._all):
            if self._windows.num_free >= num_free:
                break
            checkpoint.drop()
        return self._windows.num_free >= num_free

    def drop_oldest_state(self) -> bool:
        """Drops the oldest checkpoint of a listed page that has a snapshot; False if none has.

        One that no page lists is somebody's only state, and stays.
        """
        oldest = next((each for each in self._all if each.state_id and each.owner), None)
        if oldest is None:
            return False
        oldest.drop()
        return True

    def held_states(self) -> list[int]:
        """Returns the snapshots of all."""
        return [checkpoint.state_id for checkpoint in self._all if checkpoint.state_id]

    def held_pages(self) -> Iterable[Sequence[int]]:
        """Returns the window pages of each."""
        return [checkpoint.window_pages for checkpoint in self._all]

    def _forget(self, checkpoint: Checkpoint) -> None:
        del self._all[checkpoint]
        if self._windows is not None:
            self._windows.release(checkpoint.window_pages)
        if checkpoint.state_id and self._release_state is not None:
            self._release_state(checkpoint.state_id)

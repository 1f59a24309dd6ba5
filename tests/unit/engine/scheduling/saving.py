"""An engine over the fake device with saved slots: file work runs on threads while the test steps."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from engine.requests import Request
from engine.scheduling.wishes import RestoredSlot, Save, SavedSlot
from engine.types import SlotState
from tests.slot_stores import fake_store, restore_wish, save_wish
from tests.unit.engine.drive import A, Drive, ask

Result = TypeVar("Result")
NAME = "one.slot"
_STEPS = 5000


class Transfers:
    """An engine with a store; file work runs on its threads while the test steps."""

    def __init__(self, root: Path, *, weights: str = "fake", **config: Any) -> None:
        self.drive = Drive(**config)
        self.engine = self.drive.engine
        self.store = fake_store(root, self.drive.runner, self.drive.plan, weights=weights)

    def wait(self, done: Future[Result]) -> Result:
        for _ in range(_STEPS):
            self.drive.steps()
            try:
                return done.result(0.001)
            except TimeoutError:
                continue
        raise AssertionError("the transfer did not end")

    def run(self, request: Request) -> list[int]:
        self.engine.submit(request)
        self.drive.rest()
        return self.drive.tokens(request.request_id)

    def save(self, slot_id: int, name: str = NAME, **changes: Any) -> SavedSlot:
        wish = save_wish(self.store, slot_id, name, **changes)
        self.engine.transfer_slot(wish)
        return self.wait(wish.done)

    def restore(self, slot_id: int, name: str = NAME, **changes: Any) -> RestoredSlot:
        wish = restore_wish(self.store, slot_id, name, **changes)
        self.engine.transfer_slot(wish)
        return self.wait(wish.done)

    def warm(self, request: Request, name: str = NAME, **changes: Any) -> Save:
        """Asks for a prompt to be computed and saved."""
        assert request.slot_id is not None
        wish = save_wish(self.store, request.slot_id, name, **changes)
        self.engine.submit(replace(request, is_warming=True, max_tokens=0), save=wish)
        return wish

    def held(self, slot_id: int) -> int:
        return self.engine.snapshot().slots[slot_id].held_tokens

    def settle(self) -> None:
        """Steps until every slot is idle again."""
        for _ in range(_STEPS):
            self.drive.steps()
            if all(slot.state is SlotState.IDLE for slot in self.engine.snapshot().slots):
                self.drive.rest()
                return
            time.sleep(0.0005)  # lets the file work go on
        raise AssertionError("a slot is still in transfer")

    def state(self) -> tuple[Any, ...]:
        """What a refused operation must leave as it was."""
        now = self.engine.snapshot()
        return tuple(replace(s, request=None) for s in now.slots), now.pools


def some_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(A + (i * 7 + i // 5 + seed) % 20 for i in range(length))


def ask_in(name: str, prompt: tuple[int, ...], slot_id: int | None = 0, **changes: Any) -> Request:
    return ask(name, prompt, slot_id=slot_id, **changes)

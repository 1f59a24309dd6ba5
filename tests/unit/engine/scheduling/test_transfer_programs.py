"""Random programs of generate, save, restore, warm, erase and cancel: answers are those of cold runs.

Each seed is a program; the books of all pools are checked after every step (`Drive.steps`).
"""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.requests import Request
from engine.types import CancelCause, Finished, SlotState
from tests.slot_stores import fake_store, restore_wish, save_wish
from tests.unit.engine.drive import A, Drive, ask, solo

_TENANTS = ("0a", "0b")
_NUM_COMMANDS = 60


class Program:
    """One random life of an engine with saved slots."""

    def __init__(self, seed: int, root: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.window = rng.choice([None, None, 3, 12])
        num_slots = rng.randint(1, 3)
        is_recurrent = self.window is None and rng.random() < 0.6
        self.drive = Drive(
            num_slots=num_slots,
            context_tokens=96,
            kv_pages=rng.randint(26, 60),
            page_tokens=rng.choice([4, 8]),
            window=self.window,
            mamba_slots=num_slots + rng.choice([0, 1, 4]) if is_recurrent else None,
            snapshot_interval=rng.choice([8, 32]),
        )
        self.engine = self.drive.engine
        self.num_slots = len(self.engine.snapshot().slots)
        self.store = fake_store(root, self.drive.runner, self.drive.plan)
        self.requests: dict[str, Request] = {}
        self.outcomes: list[Future[Any]] = []
        self.num_done = 0

    def run(self) -> None:
        """Lives through the commands, comes to rest and judges every answer."""
        for _ in range(_NUM_COMMANDS):
            self._command()
            self.drive.steps(self.rng.randint(0, 4))
        self._settle()
        for name, request in self.requests.items():
            end = self.drive.end(name)
            assert end is not None, name
            if isinstance(end, Finished) and not request.is_warming:
                tokens = self.drive.tokens(name)
                assert tokens == solo(request.prompt, len(tokens), self.window), name
        for outcome in self.outcomes:
            if outcome.cancelled():
                continue
            assert outcome.done()
            error = outcome.exception()
            assert error is None or isinstance(error, EngineError), error
            self.num_done += error is None

    def _command(self) -> None:
        slot_id = self.rng.randrange(self.num_slots)
        tenant = self.rng.choice(_TENANTS)
        name = self.rng.choice(("x", "y"))
        kind = self.rng.choice(("ask", "ask", "save", "restore", "warm", "erase", "cancel", "drop"))
        match kind:
            case "ask":
                self.engine.submit(self._request(self.rng.choice([slot_id, None]), tenant))
            case "save":
                self._transfer(save_wish(self.store, slot_id, name, tenant=tenant))
            case "restore":
                self._transfer(restore_wish(self.store, slot_id, name, tenant=tenant))
            case "warm":
                request = replace(self._request(slot_id, tenant), is_warming=True, max_tokens=0)
                self.requests[request.request_id] = request
                save = save_wish(self.store, slot_id, name, tenant=tenant)
                self.engine.submit(request, save=save)
            case "erase":
                self.outcomes.append(self.engine.erase_slot(slot_id, tenant=tenant))
            case "cancel" if self.requests:
                self.engine.cancel(self.rng.choice(list(self.requests)), CancelCause.CLIENT)
            case _ if self.outcomes:
                self.rng.choice(self.outcomes).cancel()
            case _:
                pass

    def _request(self, slot_id: int | None, tenant: str) -> Request:
        # Few letters and long common heads: most prompts continue another one.
        length = self.rng.choice([1, 5, 17, 40, 70])
        prompt = [A] * (length * self.rng.randint(1, 4) // 4)
        prompt += self.rng.choices((A, A + 1), k=length - len(prompt))
        request = ask(
            f"r{len(self.requests)}",
            prompt,
            self.rng.randint(1, 8),
            slot_id=slot_id,
            tenant=tenant,
        )
        self.requests[request.request_id] = request
        return request

    def _transfer(self, wish: Any) -> None:
        self.engine.transfer_slot(wish)
        self.outcomes.append(wish.done)

    def _settle(self) -> None:
        for _ in range(5000):
            self.drive.steps()
            now = self.engine.snapshot()
            is_idle = all(slot.state is SlotState.IDLE for slot in now.slots)
            if is_idle and not now.queued and all(done.done() for done in self.outcomes):
                self.drive.rest()
                return
            time.sleep(0.0005)  # lets the file work go on
        raise AssertionError("the engine did not come to rest")


@pytest.mark.parametrize("seed", range(60))
def test_programs_keep_the_books_and_the_answers(tmp_path: Path, seed: int):
    program = Program(seed, tmp_path)
    program.run()
    assert program.num_done > 0

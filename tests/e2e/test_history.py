"""Check 28: what eight clients saw of a server that is killed, fills its disk and is rebuilt.

Clients save slots under names that they share and restore them, run requests and leave some. What
they saw is checked against a small model (`tests.e2e.register`), tokens against a first run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import resource
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import NUM_SLOTS, Start, healthy, http_client
from tests.e2e.programs import Program
from tests.e2e.register import Outcome, Read, Register, Write

pytestmark = pytest.mark.slow

_log = logging.getLogger(__name__)

# HISTORY_MINUTES says how long faults come, HISTORY_SEED which.
_MINUTES = float(os.environ.get("HISTORY_MINUTES", "1"))
_SEED = int(os.environ.get("HISTORY_SEED", "1"))
_NAMES = ("a", "b", "c", "d")
_NUM_PREDICTED = 8
_SMALL_FILES = 16 << 10
# What a server says that cannot do it now and has changed nothing.
_NOT_NOW = {
    *("SLOT_BUSY", "KV_PAGES_EXHAUSTED", "QUEUE_FULL", "MODEL_LOADING", "REBUILDING"),
    *("SHUTTING_DOWN", "DISK_FULL", "SLOT_IO", "IDENTITY_PENDING", "POOLS_BUSY", ""),
}


class Cut(Exception):
    """The server died before its answer."""


@dataclass
class Clients:
    """Eight of them, what they saw, and the server that they talk to while there is one."""

    registers: dict[str, Register] = field(default_factory=lambda: defaultdict(Register))
    seen: Counter[str] = field(default_factory=Counter[str])
    first: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    http: httpx.AsyncClient | None = None
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    num_prompts: int = 0

    async def work(self, slot_id: int) -> None:
        draw = random.Random(_SEED * 100 + slot_id)
        while not self.is_over:
            await self.is_up.wait()
            name = draw.choice(_NAMES)
            try:
                match draw.randrange(4):
                    case 0 | 1:
                        await self._save(slot_id, name)
                    case 2:
                        await self._restore(slot_id, name)
                    case _:
                        await self._leave(slot_id, draw.random() / 20)
            except Cut:
                self.seen["cut"] += 1
                await asyncio.sleep(0.05)

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        """Returns status, reason and answer."""
        if self.http is None:
            raise Cut
        try:
            reply = await self.http.post(path, json=body)
        except (httpx.HTTPError, RuntimeError) as error:
            raise Cut from error
        reason = reply.headers.get("x-kvarts-reason", "")
        if reply.status_code == 503 and "cannot be reached" in reply.text:
            # The gateway outlives its service for a moment: what became of the call, it knows not.
            raise Cut
        return reply.status_code, reason, reply.json()

    async def _complete(self, slot_id: int, length: int) -> bool:
        """Whether it was served; what it says is what it said the first time."""
        body = {
            **{"prompt": _prompt(length), "id_slot": slot_id, "n_predict": _NUM_PREDICTED},
            **{"temperature": 0, "ignore_eos": True, "return_tokens": True},
        }
        status, reason, answer = await self._post("/completion", body)
        if status != 200:
            assert reason in _NOT_NOW, answer
            return False
        tokens = answer["tokens"]
        assert self.first.setdefault(length, tokens) == tokens, length
        return True

    async def _save(self, slot_id: int, name: str) -> None:
        self.num_prompts += 1
        length = 40 + self.num_prompts % 900
        if not await self._complete(slot_id, length):
            return
        begun_s, value, outcome = time.monotonic(), length, Outcome.UNKNOWN
        try:
            status, reason, answer = await self._post(
                f"/slots/{slot_id}?action=save", {"filename": name}
            )
            outcome = Outcome.DONE if status == 200 else Outcome.REFUSED
            if status == 200:
                value = answer["n_saved"] - _NUM_PREDICTED + 1
            else:
                assert reason in _NOT_NOW, answer
            self.seen[f"save {reason or outcome.value}"] += 1
        finally:
            write = Write(value, begun_s, time.monotonic(), outcome)
            self.registers[name].writes.append(write)

    async def _restore(self, slot_id: int, name: str) -> None:
        begun_s = time.monotonic()
        status, reason, answer = await self._post(
            f"/slots/{slot_id}?action=restore", {"filename": name}
        )
        self.seen[f"restore {reason or status}"] += 1
        if status == 200:
            value = answer["n_restored"] - _NUM_PREDICTED + 1
        elif reason == "SLOT_FILE_NOT_FOUND":
            value = None
        else:
            assert reason in _NOT_NOW, answer
            return
        self.registers[name].reads.append(Read(value, begun_s, time.monotonic()))
        if value is not None:
            await self._complete(slot_id, value)

    async def _leave(self, slot_id: int, after_s: float) -> None:
        """Begins a long stream and goes away."""
        if self.http is None:
            raise Cut
        body = {"prompt": _prompt(30), "id_slot": slot_id, "n_predict": 2000, "stream": True}
        try:
            async with self.http.stream("POST", "/completion", content=json.dumps(body)):
                await asyncio.sleep(after_s)
        except (httpx.HTTPError, RuntimeError) as error:
            raise Cut from error
        self.seen["left"] += 1


def _prompt(length: int) -> list[int]:
    return [5 + (7 * i + i // 9) % 50 for i in range(length)]


async def _disturb(clients: Clients, program: Program, draw: random.Random, until_s: float) -> None:
    """A disk without room and rebuilds, until it is time to kill the server."""
    pid = program.process.pid
    (_, most) = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    while (now_s := time.monotonic()) < until_s:
        if draw.random() < 0.5:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_SMALL_FILES, most))
            await asyncio.sleep(0.5)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
            clients.seen["disk full"] += 1
        else:
            assert clients.http is not None
            body = {"kv_pages": draw.randrange(400, 1032), "drain_timeout": 5}
            reply = await clients.http.post("/pools", json=body)
            clients.seen[f"rebuild {reply.headers.get('x-kvarts-reason', 'done')}"] += 1
        await asyncio.sleep(min(1.0, max(0.0, until_s - now_s)))


@pytest.mark.timeout(300 + 120 * _MINUTES)
async def test_what_clients_saw_can_have_happened(start: Start, tmp_path: Path) -> None:
    draw, clients = random.Random(_SEED), Clients()
    workers = [asyncio.create_task(clients.work(slot_id)) for slot_id in range(NUM_SLOTS)]
    over_s = time.monotonic() + 60 * _MINUTES
    num_kills = 0
    try:
        while time.monotonic() < over_s:
            with start("--slot-save-path", str(tmp_path), "--cache-ram", "0") as program:
                url = await asyncio.to_thread(program.ready().http_url)
                await healthy(url)
                async with http_client(url) as clients.http:
                    clients.is_up.set()
                    await _disturb(clients, program, draw, time.monotonic() + draw.uniform(5, 15))
                    clients.is_up.clear()
                    program.process.send_signal(signal.SIGKILL)
                    await asyncio.to_thread(program.exit_status)
                    num_kills += 1
                clients.http = None
            for worker in workers:
                if worker.done():
                    worker.result()
        with start("--slot-save-path", str(tmp_path), "--cache-ram", "0") as program:
            url = await asyncio.to_thread(program.ready().http_url)
            await healthy(url)
            async with http_client(url) as clients.http:
                clients.is_over = True
                clients.is_up.set()
                await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    numbers = {
        name: (len(one.writes), len(one.reads)) for name, one in sorted(clients.registers.items())
    }
    _log.info("%d kills, %s, writes and reads %s", num_kills, dict(clients.seen), numbers)
    for name, register in clients.registers.items():
        assert not register.impossible(), name
        assert register.reads

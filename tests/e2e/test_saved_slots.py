"""Saved slots and whole servers that are killed: what was saved is there after the next start."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import NUM_SLOTS, Start, healthy, http_client
from tests.e2e.programs import Program

pytestmark = pytest.mark.slow

_log = logging.getLogger(__name__)

# A whole run takes about half an hour; SLOT_KILLS says how many there are, SLOT_SEED which.
_NUM_KILLS = int(os.environ.get("SLOT_KILLS", "200"))
_SEED = int(os.environ.get("SLOT_SEED", "1"))
# A save of these states takes about half of it on a busy machine.
_SAVE_S = 0.03


@asynccontextmanager
async def _serving(program: Program) -> AsyncGenerator[httpx.AsyncClient]:
    url = await asyncio.to_thread(program.ready().http_url)
    await healthy(url)
    async with http_client(url) as http:
        yield http


async def _answer(http: httpx.AsyncClient, prompt: list[int], slot_id: int) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "id_slot": slot_id,
        "n_predict": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    reply = await http.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def _slot(http: httpx.AsyncClient, action: str, slot_id: int, **body: Any) -> dict[str, Any]:
    reply = await http.post(f"/slots/{slot_id}?action={action}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _prompt(slot_id: int, length: int) -> list[int]:
    return [5 + (7 * i + slot_id * 31 + i // 9) % 50 for i in range(length)]


async def _killed(program: Program) -> None:
    """SIGKILL; its child, the gateway, ends by itself."""
    program.process.send_signal(signal.SIGKILL)
    assert await asyncio.to_thread(program.exit_status) == -signal.SIGKILL


async def test_all_slots_go_on_after_a_kill(start: Start, tmp_path: Path) -> None:
    """Check 8."""
    answers: list[dict[str, Any]] = []
    saved: list[int] = []
    with start("--slot-save-path", str(tmp_path)) as program:
        async with _serving(program) as http:
            for slot_id in range(NUM_SLOTS):
                prompt = _prompt(slot_id, 300 + 40 * slot_id)
                answers.append(await _answer(http, prompt, slot_id))
                done = await _slot(http, "save", slot_id, filename=f"slot-{slot_id}")
                saved.append(done["n_saved"])
                assert done["n_saved"] == len(prompt) + 7
        await _killed(program)
    with start("--slot-save-path", str(tmp_path)) as program:
        async with _serving(program) as http:
            for slot_id, (answer, num_saved) in enumerate(zip(answers, saved, strict=True)):
                lane = NUM_SLOTS - 1 - slot_id
                done = await _slot(http, "restore", lane, filename=f"slot-{slot_id}")
                assert done["n_restored"] == num_saved
                prompt = _prompt(slot_id, 300 + 40 * slot_id)
                longer = [*prompt, *answer["tokens"], 9]
                warm = await _answer(http, longer, lane)
                assert warm["tokens_cached"] >= num_saved
                assert warm["timings"]["cache_n"] == num_saved
                cold = await http.post(
                    "/completion",
                    json={
                        "prompt": longer,
                        "n_predict": 8,
                        "temperature": 0,
                        "ignore_eos": True,
                        "return_tokens": True,
                        "cache_prompt": False,
                    },
                )
                assert warm["tokens"] == cold.json()["tokens"]


@pytest.mark.timeout(300 + 20 * _NUM_KILLS)
async def test_a_kill_in_a_save_leaves_the_old_file_or_the_new(
    start: Start, tmp_path: Path
) -> None:
    """Check 1: at any time of an overwriting save; temporaries are gone after the next start."""
    rng = random.Random(_SEED)
    first: dict[int, list[int]] = {}
    outcomes = Counter[str]()
    pair: list[int] = []
    for turn in range(_NUM_KILLS + 1):
        with start("--slot-save-path", str(tmp_path)) as program:
            async with _serving(program) as http:
                assert set(await asyncio.to_thread(os.listdir, tmp_path)) <= {"one"}
                if turn:
                    length = await _proved(http, first)
                    assert length in pair, f"turn {turn}: neither the old file nor the new one"
                    outcomes["new" if length == pair[1] else "old"] += 1
                    _log.info("kills so far: %s", dict(outcomes))
                if turn == _NUM_KILLS:
                    break
                pair = rng.sample((600, 900, 1200), 2)
                for length in pair:
                    tokens = (await _answer(http, _prompt(length, length), 0))["tokens"]
                    assert first.setdefault(length, tokens) == tokens, "not the cold run's"
                    if length == pair[0]:
                        await _slot(http, "save", 0, filename="one")
                body = {"filename": "one"}
                saving = asyncio.create_task(http.post("/slots/0?action=save", json=body))
                # Half of them from the call on, half from when the new file is being written.
                await asyncio.sleep(0)
                if turn % 2:
                    await asyncio.to_thread(_wait_for_temporary, tmp_path, saving)
                await asyncio.sleep(rng.random() * _SAVE_S)
                await _killed(program)
                await asyncio.gather(saving, return_exceptions=True)


def _wait_for_temporary(folder: Path, saving: asyncio.Task[httpx.Response]) -> None:
    while not saving.done() and set(os.listdir(folder)) <= {"one"}:
        pass


async def _proved(http: httpx.AsyncClient, first: dict[int, list[int]]) -> int:
    """Restores the file, whichever it is, and goes on from it; returns its prompt's length."""
    length = (await _slot(http, "restore", 0, filename="one"))["n_restored"] - 7
    prompt = _prompt(length, length)
    again = await _answer(http, prompt, 0)
    assert again["tokens"] == first[length]
    assert again["timings"]["cache_n"] == length - 1
    return length

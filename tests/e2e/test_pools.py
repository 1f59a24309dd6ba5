"""Pools of whole servers: all memory stays under the budget, and a kill amid a rebuild leaves nothing."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import NUM_SLOTS, SLOT_TOKENS, Start, healthy, http_client
from tests.e2e.programs import Program
from tests.waiting import until

BUDGET_MIB = 700
# Check 26: what a budget leaves to whatever comes with load.
BEYOND_BYTES = 256 << 20
# A nightly run kills more often; half of the kills come while nothing is served.
NUM_KILLS = int(os.environ.get("REBUILD_KILLS", "2"))

pytestmark = pytest.mark.slow


@asynccontextmanager
async def _serving(program: Program) -> AsyncGenerator[httpx.AsyncClient]:
    url = await asyncio.to_thread(program.ready().http_url)
    await healthy(url)
    async with http_client(url) as http:
        yield http


def _prompt(seed: int, length: int) -> list[int]:
    return [5 + (7 * i + seed * 31 + i // 9) % 50 for i in range(length)]


def _body(seed: int, length: int, count: int = 8, **more: Any) -> dict[str, Any]:
    same = {"temperature": 0, "ignore_eos": True, "return_tokens": True}
    return {"prompt": _prompt(seed, length), "n_predict": count} | same | more


async def _kv(http: httpx.AsyncClient) -> dict[str, Any]:
    (pool,) = [one for one in (await http.get("/pools")).json()["pools"] if one["kind"] == "kv"]
    return pool


def _peak_bytes(program: Program) -> int:
    status = Path(f"/proc/{program.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_all_memory_of_a_process_stays_under_its_budget(start: Start, tmp_path: Path) -> None:
    """Check 26: long prompts in all slots, others that wait or are too long, slot files, a rebuild."""
    folder = tmp_path / "slots"
    folder.mkdir()
    # Nothing is compiled already.
    flags = ("--slot-save-path", str(folder), "--compile-cache", str(tmp_path / "xla"))
    with start("--memory-budget", str(BUDGET_MIB), *flags) as program:
        async with _serving(program) as http:
            for turn in range(2):
                lengths = [SLOT_TOKENS - 40, SLOT_TOKENS // 2, 30, SLOT_TOKENS + 9] * NUM_SLOTS
                asked = [
                    http.post("/completion", json=_body(100 * turn + seed, length))
                    for seed, length in enumerate(lengths)
                ]
                statuses = [reply.status_code for reply in await asyncio.gather(*asked)]
                assert [s for s in statuses if s != 200] == [400] * NUM_SLOTS
                for action in ("save", "restore"):
                    works = [
                        http.post(f"/slots/{i}?action={action}", json={"filename": f"s{i}"})
                        for i in range(NUM_SLOTS)
                    ]
                    assert {reply.status_code for reply in await asyncio.gather(*works)} == {200}
            kv = await _kv(http)
            # Pages have taken what there was.
            assert kv["size"] * kv["unit_bytes"] > 64 << 20
            reply = await http.post("/pools", json={"kv_pages": kv["size"] - 100})
            assert reply.status_code == 200, reply.text
            larger = await http.post("/pools", json={"kv_pages": 2 * kv["size"]})
            assert larger.headers["x-kvarts-reason"] == "TOO_LARGE"
            peak = _peak_bytes(program)
    print(f"at most {peak >> 20} MiB, the budget is {BUDGET_MIB}")
    assert peak <= (BUDGET_MIB << 20) + BEYOND_BYTES


def test_a_budget_that_the_process_alone_exceeds_is_refused(start: Start) -> None:
    with start("--memory-budget", "64") as program:
        refusal = re.compile(r"memory_budget: \d+ bytes are too few: \d+ for the process itself")
        program.output.wait_for(refusal, 240)
        assert program.exit_status() == 1


@pytest.mark.timeout(300 + 120 * NUM_KILLS)
async def test_a_kill_amid_a_rebuild_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    """Check 29: the next start has the sizes of its flags, the saved file, and the same answers."""
    rng = random.Random(29)
    folder, cache = tmp_path / "slots", tmp_path / "xla"
    folder.mkdir()
    flags = ("--slot-save-path", str(folder), "--compile-cache", str(cache))
    expected: dict[str, Any] = {}
    pages, rebuild_s = 0, 0.0
    for turn in range(NUM_KILLS + 1):
        with start(*flags) as program:
            async with _serving(program) as http:
                if not turn:
                    pages = (await _kv(http))["size"]
                    expected = (
                        await http.post("/completion", json=_body(1, 900, id_slot=0))
                    ).json()
                    saved = await http.post("/slots/0?action=save", json={"filename": "one"})
                    assert saved.status_code == 200
                else:
                    await _proved(http, folder, pages, expected["tokens"])
                began_s = time.monotonic()
                # Other sizes each time, or the second time nothing would be compiled.
                wish = {"kv_pages": pages + 64 * (turn + 1), "drain_timeout": 60}
                rebuilding = asyncio.create_task(http.post("/pools", json=wish))
                if not turn:
                    assert (await rebuilding).status_code == 200
                    rebuild_s = time.monotonic() - began_s
                    continue
                running = [
                    asyncio.create_task(http.post("/completion", json=_body(seed, 40, 2000)))
                    for seed in range(4)
                ]
                if turn % 2:
                    await until(
                        lambda http=http: http.get("/pools"),
                        lambda reply: reply.json()["state"] != "serving",
                    )
                    await asyncio.sleep(rng.random() * 3)
                else:
                    await asyncio.sleep(rng.random() * rebuild_s)
                program.process.send_signal(signal.SIGKILL)
                assert await asyncio.to_thread(program.exit_status) == -signal.SIGKILL
                await asyncio.gather(rebuilding, *running, return_exceptions=True)
    with start(*flags) as program:
        async with _serving(program) as http:
            await _proved(http, folder, pages, expected["tokens"])


async def _proved(http: httpx.AsyncClient, folder: Path, pages: int, expected: list[int]) -> None:
    """The server is as after any start, goes on from the file, and answers as at first."""
    kv = await _kv(http)
    assert (kv["size"], kv["free"]) == (pages, pages)
    assert await asyncio.to_thread(os.listdir, folder) == ["one"]
    restored = await http.post("/slots/0?action=restore", json={"filename": "one"})
    assert restored.status_code == 200, restored.text
    warm = (await http.post("/completion", json=_body(1, 900, id_slot=0))).json()
    cold = (await http.post("/completion", json=_body(1, 900, cache_prompt=False))).json()
    assert warm["timings"]["cache_n"] == 899
    assert warm["tokens"] == cold["tokens"] == expected

"""kvarts-pools against a service: a table, a plan before it asks, and what it says when refused."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvarts.v1 import generation_pb2, rebuild_pb2

from gateway import pool_command
from gateway.pool_table import aligned, bar, pool_table, size_text, state_text
from tests.contract.serving import Serving, serving
from tests.fake_runner import EXPERTS, FakeRunner

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Said:
    """What a run of the command printed, and its status."""

    status: int
    out: str
    err: str


async def run(it: Serving, *words: str, typed: str = "") -> Said:
    out, err = io.StringIO(), io.StringIO()
    argv = ["--service", f"127.0.0.1:{it.server.port}", *words]
    status = await asyncio.to_thread(pool_command.run, argv, io.StringIO(typed), out, err)
    return Said(status, out.getvalue(), err.getvalue())


async def sizes(it: Serving) -> dict[int, int]:
    reply = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
    return {pool.kind: pool.size for pool in reply.pools}


async def test_it_shows_the_pools() -> None:
    runner = FakeRunner(16 + 4, 16, num_experts=EXPERTS.floor)
    async with serving(runner=runner) as it:
        await it.collect(generation_pb2.GenerateRequest(text="hello", max_tokens=2))
        said = await run(it)
    assert said.status == 0
    kv, experts = said.out.splitlines()[1:3]
    assert kv.startswith("kv ")
    assert "16 tokens" in kv
    assert kv.endswith("[=" + "." * 31 + "]") or "=" in kv
    assert experts.startswith("moe_cache ")
    assert experts.endswith("[" + "-" * 32 + "]")
    assert "; serving" in said.out
    assert "prompts read experts ahead: no" in said.out


async def test_it_plans_and_asks_before_it_acts() -> None:
    async with serving() as it:
        before = await sizes(it)
        no = await run(it, "--kv-pages", "64", typed="n\n")
        assert await sizes(it) == before
        nobody = await run(it, "--kv-pages", "64")
        planned = await run(it, "--kv-pages", "64", "--plan")
        assert await sizes(it) == before
        yes = await run(it, "--kv-pages", "64", typed="y\n")
        assert (await sizes(it))[rebuild_pb2.POOL_KIND_KV] == 64
        same = await run(it, "--kv-pages", "64", "--yes")
    for said in (no, nobody):
        assert said.status == 1
        assert "64" in said.out
        assert said.out.rstrip().endswith("rebuild? [y/N] nothing was changed")
    assert planned.status == yes.status == same.status == 0
    assert "rebuild?" not in planned.out
    assert "done in" in yes.out
    assert "warm" in yes.out
    assert same.out.rstrip().endswith("nothing to do")


async def test_a_refusal_is_one_line_with_its_numbers() -> None:
    async with serving() as it:
        before = await sizes(it)
        below = await run(it, "--kv-pages", "1", "--yes")
        missing = await run(it, "--swa-pages", "9", "--yes")
        large = await run(it, "--kv-pages", str(1 << 40), "--yes")
        assert await sizes(it) == before
    assert (below.status, below.err) == (1, "kvarts-pools: kv: 1 is below the floor of 2\n")
    assert missing.err == "kvarts-pools: a  model has no pool swa\n"
    assert "bytes are needed, the budget is" in large.err
    assert large.err.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "cause"),
    [("127.0.0.1:1", "connection refused"), ("nobody.invalid:1", "its name is not known")],
)
async def test_nobody_at_the_address_is_said_in_a_line(address: str, cause: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    argv = ["--service", address]
    assert await asyncio.to_thread(pool_command.run, argv, io.StringIO(), out, err) == 1
    assert err.getvalue() == f"kvarts-pools: no service at {address}: {cause}\n"


class Heard(io.StringIO):
    """What is printed; `event` is set once a line begins so."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.event = threading.Event()
        self._start = start

    def write(self, text: str) -> int:
        if text.startswith(self._start):
            self.event.set()
        return super().write(text)


async def test_it_says_what_the_service_is_doing() -> None:
    """Programs are ready only after it has told that they are compiled."""
    out = Heard("compiling")

    def compile_when_told(work: Callable[[], None]) -> None:
        def wait() -> None:
            out.event.wait(PATIENCE_S)
            work()

        threading.Thread(target=wait, daemon=True).start()

    async with serving(parts={"start_compiling": compile_when_told}) as it:
        argv = ["--service", f"127.0.0.1:{it.server.port}", "--kv-pages", "64", "--yes"]
        err = io.StringIO()
        status = await asyncio.to_thread(pool_command.run, argv, io.StringIO(), out, err)
    assert (status, err.getvalue()) == (0, "")
    assert out.event.is_set()
    said = out.getvalue()
    assert said.count("compiling for the new sizes; requests are served\n") == 1
    assert said.index("compiling") < said.index("done in")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("SERVING", "compiling"),
        ("DRAINING", "waiting"),
        ("REBUILDING", "replacing"),
        ("FAILED", ""),
    ],
)
def test_only_of_its_own_rebuild_it_says_so(state: str, text: str) -> None:
    value = rebuild_pb2.RebuildState.Value(f"REBUILD_STATE_{state}")
    reply = rebuild_pb2.GetPoolsResponse(state=value, last_request_id="a")
    assert state_text(reply, "a").startswith(text)
    assert bool(state_text(reply, "a")) == bool(text)
    assert state_text(reply, "b") == ""


async def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("root\n")
    async with serving(api_keys=("user",), admin_key="root") as it:
        without = await run(it)
        with_key = await run(it, "--api-key-file", str(key), "--kv-pages", "64", "--yes")
        gone = await run(it, "--api-key-file", str(tmp_path / "none"))
    assert without.status == 1
    assert with_key.status == 0
    assert gone.status == 1
    assert "No such file" in gone.err


@pytest.mark.parametrize(
    "words", [["--kv-pages", "-1"], ["--kv-pages", "x"], ["--drain-timeout", "-1"]]
)
def test_bad_words_are_refused_by_name(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        pool_command.run(words, io.StringIO(), io.StringIO(), io.StringIO())
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_help_names_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        pool_command.run(["--help"], io.StringIO(), io.StringIO(), io.StringIO())
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in ("--kv-pages", "--swa-pages", "--mamba-slots", "--moe-cache-slots", "--plan"):
        assert name in said


@pytest.mark.parametrize(
    ("counts", "marks"),
    [
        ((0, 0, 0, 64), "." * 32),
        ((32, 16, 8, 8), "#" * 16 + "=" * 8 + "-" * 4 + "." * 4),
        ((1, 1, 1, 9997), "#=-" + "." * 29),
        ((9999, 1, 0, 0), "#" * 31 + "="),
    ],
)
def test_a_bar_has_a_mark_for_whatever_there_is(
    counts: tuple[int, int, int, int], marks: str
) -> None:
    used, pinned, cached, free = counts
    pool = rebuild_pb2.Pool(size=sum(counts), used=used, pinned=pinned, cached=cached, free=free)
    assert bar(pool) == f"[{marks}]"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (-(5 << 30), "-5.0 GiB"),
        (300 << 20, "300 MiB"),
    ],
)
def test_sizes_are_short(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_an_over_committed_budget_is_shown_as_it_is() -> None:
    reply = rebuild_pb2.GetPoolsResponse(budget_bytes=-1024, state=rebuild_pb2.REBUILD_STATE_FAILED)
    assert "may take -1.0 KiB" in pool_table(reply)
    assert "; failed" in pool_table(reply)


def test_columns_are_aligned() -> None:
    assert aligned([("a", "b", "c"), ("aa", "bbb", "c")]) == ["a     b  c", "aa  bbb  c"]

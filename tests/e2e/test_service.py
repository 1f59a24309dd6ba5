"""kvarts-service by itself: questions, refusals, and one clear line for each failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.conftest import Server
from tests.e2e.programs import Program, running
from tests.e2e.rpc import client

pytestmark = pytest.mark.slow


def complaints(program: Program) -> list[str]:
    """The lines that tell of an error; a traceback would be one too many."""
    text = program.output.text()
    assert "Traceback" not in text, text
    marks = (" E ", " C ", "kvarts-service: ")
    return [line for line in program.output.lines if any(mark in line for mark in marks)]


def test_questions_are_answered_on_the_spot() -> None:
    with running("kvarts-service", "--help") as program:
        assert program.exit_status() == 0
        assert "--grpc-port" in program.output.text()
    with running("kvarts-service", "--version") as program:
        assert program.exit_status() == 0
        assert program.output.lines[0].startswith("kvarts-service ")


def test_a_model_that_cannot_be_had_ends_it_with_one_line(tiny_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_model.read_bytes()[:1000])
    for path in (tmp_path / "missing.gguf", damaged):
        with running("kvarts-service", "-m", str(path), "--grpc-port", "0") as program:
            assert program.exit_status() == 1
            (line,) = complaints(program)
            assert path.name in line


async def test_a_taken_port_ends_the_second_one_with_one_line(
    server: Server, tiny_model: Path
) -> None:
    port = server.grpc_address.rpartition(":")[2]
    with running("kvarts-service", "-m", str(tiny_model), "--grpc-port", port) as program:
        assert await asyncio.to_thread(program.exit_status) == 1
        (line,) = complaints(program)
        assert f"127.0.0.1:{port}" in line


async def test_a_compile_cache_that_cannot_be_had_is_a_warning(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    flags = ("-m", str(tiny_model), "-np", "1", "-ub", "32", "--grpc-port", "0")
    cache = ("--compile-cache", str(tmp_path / "file" / "cache"))
    with running("kvarts-service", *flags, *cache) as program:
        await asyncio.to_thread(program.ready)
        (line,) = [line for line in program.output.lines if " W " in line]
        assert str(tmp_path / "file" / "cache") in line
        async with client(program.grpc_address()) as rpc:
            assert (await rpc.info()).num_slots == 1

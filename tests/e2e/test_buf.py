"""`buf curl`: a client that knows only what reflection tells it."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2

from tests.e2e.conftest import KEY, Server
from tests.e2e.programs import SCRIPTS

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Reply:
    """What one call of buf printed."""

    status: int
    stdout: str
    stderr: str

    def messages(self) -> list[dict[str, Any]]:
        """Reads the JSON objects that it printed one after the other."""
        decoder, text, found = json.JSONDecoder(), self.stdout.strip(), list[dict[str, Any]]()
        while text:
            message, end = decoder.raw_decode(text)
            found.append(message)
            text = text[end:].lstrip()
        return found


@pytest.fixture
def buf_home(tmp_path: Path) -> dict[str, str]:
    return {"BUF_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}


async def curl(server: Server, home: dict[str, str], *arguments: str, path: str = "") -> Reply:
    process = await asyncio.create_subprocess_exec(
        *(str(SCRIPTS / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge"),
        *("-H", f"authorization: Bearer {KEY}", "--reflect-header", "*", *arguments),
        f"http://{server.grpc_address}{path}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=home,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Reply(process.returncode, stdout.decode(), stderr.decode())


async def test_reflection_lists_every_service(server: Server, buf_home: dict[str, str]) -> None:
    reply = await curl(server, buf_home, "--list-services")
    assert reply.status == 0, reply.stderr
    names = reply.stdout.split()
    kinds = ("Generation", "Tokenization", "Embedding", "Model", "Slot", "Lora", "Rebuild")
    assert {f"kvarts.v1.{kind}Service" for kind in kinds} <= set(names)
    assert "grpc.health.v1.Health" in names


async def test_generate_streams(server: Server, buf_home: dict[str, str]) -> None:
    body = '{"text": "the day", "max_tokens": 5, "sampling": {"temperature": 0}}'
    path = "/kvarts.v1.GenerationService/Generate"
    reply = await curl(server, buf_home, "-d", body, path=path)
    assert reply.status == 0, reply.stderr
    first, *middle, last = reply.messages()
    assert first["started"]["promptTokens"] > 0
    assert [set(message) for message in middle] == [{"chunk"}] * 5
    assert last["finished"]["finishReason"] == "FINISH_REASON_LENGTH"


async def test_an_error_has_its_details(server: Server, buf_home: dict[str, str]) -> None:
    body = '{"text": "the", "sampling": {"top_p": 2}}'
    path = "/kvarts.v1.GenerationService/Generate"
    reply = await curl(server, buf_home, "-d", body, path=path)
    assert reply.status != 0
    error = json.loads(reply.stderr)
    assert error["code"] == "invalid_argument"
    details = {detail["type"]: _decoded(detail["value"]) for detail in error["details"]}
    info = error_details_pb2.ErrorInfo.FromString(details["google.rpc.ErrorInfo"])
    assert (info.reason, info.domain) == ("INVALID_FIELD", "kvarts.v1")
    bad = error_details_pb2.BadRequest.FromString(details["google.rpc.BadRequest"])
    assert [violation.field for violation in bad.field_violations] == ["sampling.top_p"]


def _decoded(value: str) -> bytes:
    """Decodes base64, which buf prints without its padding."""
    return base64.b64decode(value + "=" * (-len(value) % 4))

"""Node without generated code: `@grpc/grpc-js` reads the .proto files themselves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import KEY, NUM_SLOTS, Server

pytestmark = pytest.mark.slow

_HERE = Path(__file__).parent / "node"
_PROTO = Path(__file__).parents[2] / "proto"
# npm's own words for a registry that it cannot reach.
_UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET")


@pytest.fixture(scope="module")
def node_modules(cache_dir: Path) -> Path:
    """The client's packages, installed once."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = cache_dir / "node"
    folder.mkdir(exist_ok=True)
    wanted, installed = (_HERE / "package.json").read_bytes(), folder / "installed.json"
    if not installed.exists() or installed.read_bytes() != wanted:
        (folder / "package.json").write_bytes(wanted)
        install = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-save")
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
        if any(word in done.stderr for word in _UNREACHABLE):
            pytest.skip("needs a network: npm reaches no registry")
        assert done.returncode == 0, done.stderr
        installed.write_bytes(wanted)
    return folder / "node_modules"


async def node(server: Server, modules: Path, action: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *("node", str(_HERE / "client.js"), str(_PROTO), server.grpc_address, KEY, action),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(modules)},
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return json.loads(stdout)


async def test_generate_streams(
    server: Server, http: httpx.AsyncClient, node_modules: Path
) -> None:
    started, *chunks, finished = await node(server, node_modules, "generate")
    assert started["started"]["promptTokens"] > 0
    assert finished["finished"]["finishReason"] == "FINISH_REASON_LENGTH"
    assert len(chunks) == finished["finished"]["completionTokens"] == 5
    body = {"prompt": "the day", "n_predict": 5, "temperature": 0}
    reply = (await http.post("/completion", json=body)).json()
    assert "".join(chunk["chunk"]["text"] for chunk in chunks) == reply["content"]


async def test_tokenize(server: Server, node_modules: Path) -> None:
    tokens = await node(server, node_modules, "tokenize")
    assert [token["piece"] for token in tokens] == [" the", " day"]


async def test_an_error_has_a_code_and_details(server: Server, node_modules: Path) -> None:
    refused = await node(server, node_modules, "refused")
    assert refused["events"] == []
    assert refused["code"] == "NOT_FOUND"
    assert refused["info"] == {
        "reason": "NO_SUCH_SLOT",
        "domain": "kvarts.v1",
        "metadata": {"slotId": "4000", "slotCount": str(NUM_SLOTS)},
    }


async def test_cancel_frees_the_slot(server: Server, node_modules: Path) -> None:
    before = (await server.rpc.info()).counters.requests_cancelled
    seen = await node(server, node_modules, "cancel")
    assert seen["code"] == "CANCELLED"
    assert seen["kinds"][:2] == ["started", "chunk"]
    assert "finished" not in seen["kinds"]
    assert seen["states"] == ["SLOT_STATE_IDLE"] * NUM_SLOTS
    await server.rpc.cancelled(before + 1)

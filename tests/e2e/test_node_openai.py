"""The official `openai` client for Node, streaming and not."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import CALL_TOKEN, KEY, Server
from tests.e2e.test_node import node_modules

pytestmark = pytest.mark.slow

__all__ = ["node_modules"]

_CLIENT = Path(__file__).parent / "node" / "openai.js"


async def node(server: Server, modules: Path, action: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *("node", str(_CLIENT), f"{server.url}/v1", KEY, str(CALL_TOKEN), action),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NODE_PATH": str(modules)},
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return json.loads(stdout)


async def test_chat_streams_what_it_answers_at_once(assistant: Server, node_modules: Path) -> None:
    seen = await node(assistant, node_modules, "chat")
    assert seen["streamed"] == seen["whole"] != ""
    assert seen["usage"]["completion_tokens"] == 12


async def test_streamed_calls_add_up_to_the_answer(assistant: Server, node_modules: Path) -> None:
    seen = await node(assistant, node_modules, "tools")
    assert seen["reasons"] == ["tool_calls", "tool_calls"]
    assert seen["streamed"] == seen["whole"] != []
    for call in seen["whole"]:
        assert call["name"] == "warmth"
        assert json.loads(call["arguments"])["unit"] in ("celsius", "kelvin")


async def test_an_answer_has_the_shape_of_its_schema(assistant: Server, node_modules: Path) -> None:
    assert (await node(assistant, node_modules, "schema"))["unit"] in ("celsius", "kelvin")


async def test_logprobs(assistant: Server, node_modules: Path) -> None:
    tokens = await node(assistant, node_modules, "logprobs")
    assert [len(token["top_logprobs"]) for token in tokens] == [3] * 4
    # Greedy: the sampled token is the likeliest.
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0 for token in tokens)


async def test_embeddings_are_unit_vectors_in_both_encodings(
    assistant: Server, node_modules: Path
) -> None:
    seen = await node(assistant, node_modules, "embeddings")
    assert np.allclose(seen["decoded"], seen["plain"], atol=1e-6)
    assert np.linalg.norm(seen["plain"], axis=1) == pytest.approx([1, 1], abs=1e-5)


async def test_errors_have_their_own_classes(assistant: Server, node_modules: Path) -> None:
    assert await node(assistant, node_modules, "errors") == {
        "key": {"is": True, "status": 401, "type": "authentication_error"},
        "field": {"is": True, "status": 400, "type": "invalid_request_error"},
        "absent": {"is": True, "status": 501, "type": "not_supported_error"},
    }


async def test_leaving_a_stream_frees_the_slot(assistant: Server, node_modules: Path) -> None:
    before = (await assistant.rpc.info()).counters.requests_cancelled
    assert await node(assistant, node_modules, "cancel") == {"seen": 3, "aborted": True}
    await assistant.rpc.cancelled(before + 1)
    await assistant.rpc.idle()

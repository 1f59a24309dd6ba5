"""The document of all routes, against the tables that it is made of."""

from __future__ import annotations

import re
from typing import Any, cast

import httpx
import pytest

from gateway.errors import ErrorKind
from gateway.routes import route_table
from gateway.schema import FIELDS
from gateway.slots import is_filename
from tests.unit.gateway.conftest import Serve


async def test_every_route_is_there_and_nothing_else(client: httpx.AsyncClient):
    shown = (await client.get("/openapi.json")).json()
    assert shown["openapi"] == "3.1.0"
    rows = {(path, method.lower()) for method, paths, _ in route_table() for path in paths}
    found = {(path, method) for path, operations in shown["paths"].items() for method in operations}
    assert found == rows | {("/openapi.json", "get")}


async def test_bodies_have_every_field(client: httpx.AsyncClient):
    shown = (await client.get("/openapi.json")).json()
    named = {name for field in FIELDS for name in field.names or (field.parameter,)}
    for path in ("/completion", "/v1/completions", "/v1/chat/completions", "/infill"):
        body = _body(shown, path)
        assert named <= body["properties"].keys(), path
    assert _body(shown, "/completion")["properties"]["repeat_last_n"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**31 - 1,
    }
    for path in ("/v1/messages/count_tokens", "/chat/completions/input_tokens", "/rerank"):
        assert _body(shown, path)["type"] == "object", path


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_it_says_where_a_key_is_needed(serve: Serve, prefix: str, keys: tuple[str, ...]):
    async with serve(api_prefix=prefix, api_keys=keys) as client:
        headers = {"authorization": "Bearer key"}
        shown = (await client.get(f"{prefix}/openapi.json", headers=headers)).json()
        open_ones = {
            path
            for path, operations in shown["paths"].items()
            if not any(operation.get("security") for operation in operations.values())
        }
        assert open_ones == (
            set(shown["paths"]) if not keys else set() if prefix else {"/health", "/v1/health"}
        )


async def test_every_refusal_has_its_status(client: httpx.AsyncClient):
    shown = (await client.get("/openapi.json")).json()
    expected = {"200", "4XX", *(str(k.status) for k in ErrorKind if k.status >= 500)}
    for operations in shown["paths"].values():
        assert all(one["responses"].keys() == expected for one in operations.values())


@pytest.mark.parametrize("name", ["a", "a.b", "a-b_c", "9", "-a", "a" * 255])
@pytest.mark.parametrize("behind", ["", ".", "..b", "/b", " "])
async def test_the_pattern_of_a_file_name_is_the_gateways(
    client: httpx.AsyncClient, name: str, behind: str
):
    schema = _body((await client.get("/openapi.json")).json(), "/slots/{id_slot}")
    filename, text = schema["properties"]["filename"], name + behind
    fits = bool(re.fullmatch(filename["pattern"], text)) and len(text) <= filename["maxLength"]
    assert fits == is_filename(text)


async def test_paths_have_the_prefix_and_the_document_needs_the_key(serve: Serve):
    async with serve(api_prefix="/llm", api_keys=("key",)) as client:
        assert (await client.get("/llm/openapi.json")).status_code == 401
        headers = {"authorization": "Bearer key"}
        shown = (await client.get("/llm/openapi.json", headers=headers)).json()
    assert all(path.startswith("/llm/") for path in shown["paths"])


def _body(shown: dict[str, Any], path: str) -> dict[str, Any]:
    content = shown["paths"][path]["post"]["requestBody"]["content"]
    return cast("dict[str, Any]", content["application/json"]["schema"])

"""What a page may call at /tools, and that it is off by itself."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest

from gateway.flags import FlagError, parse
from tests.unit.gateway.conftest import Serve


async def test_without_the_flag_there_are_none(client: httpx.AsyncClient):
    for answer in (await client.get("/tools"), await client.post("/tools", json={})):
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "feature_disabled"


async def test_the_one_that_is_here_says_where_it_runs(serve: Serve):
    async with serve(has_tools=True) as client:
        (shown,) = (await client.get("/tools")).json()
        assert list(shown) == [
            "display_name", "tool", "type", "permissions", "uses_cwd", "definition",
        ]  # fmt: skip
        assert shown["permissions"] == {"write": False}
        assert shown["definition"]["function"]["name"] == shown["tool"] == "get_info"
        told = (await client.post("/tools", json={"tool": "get_info"})).json()
        assert told["os"].split()[:2] == [os.uname().sysname, os.uname().release]
        assert told["cwd"] == os.getcwd()
        headers = {"x-tool-cwd": "/elsewhere"}
        body = {"tool": "get_info", "params": {"cwd": "/nowhere"}}
        there = await client.post("/tools", json=body, headers=headers)
        assert there.json()["cwd"] == "/elsewhere"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"tool": "exec_shell_command", "params": {"command": "true"}}, 404),
        ({"tool": "get_info", "stream": True}, 404),
        ({"tool": 5}, 400),
        ({}, 400),
        ([], 400),
    ],
)
async def test_what_is_no_call_of_it(serve: Serve, body: Any, status: int):
    async with serve(has_tools=True) as client:
        answer = await client.post("/tools", json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status


async def test_it_needs_the_key(serve: Serve):
    async with serve(has_tools=True, api_keys=("key",)) as client:
        assert (await client.get("/tools")).status_code == 401


def test_the_flag_of_a_gateway_of_its_own():
    plain, told = parse(["--service", "a:1"], {}), parse(["--service", "a:1", "--tools", "all"], {})
    assert (plain.has_tools, plain.cors_origins) == (False, "*")
    assert (told.has_tools, told.cors_origins) == (True, "localhost")
    named = ["--service", "a:1", "--tools", "get_info", "--cors-origins", "*"]
    assert parse(named, {}).cors_origins == "*"
    with pytest.raises(FlagError, match="--tools 'read_file': must be get_info or all"):
        parse(["--service", "a:1", "--tools", "read_file"], {})

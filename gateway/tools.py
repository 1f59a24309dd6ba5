"""The tools that a page may call here: GET and POST /tools, once an operator has switched them on.

Of the peer's seven only the one that neither touches a file nor starts a program is here: whoever
reaches the route could otherwise do with this machine what its user can. Knows no model.

Source: llama-server's route of the same name.
"""

from __future__ import annotations

import os
import platform
from typing import Any, cast

from starlette.responses import Response

from gateway.connection import json_response
from gateway.disabled import feature_disabled
from gateway.errors import ApiError, ErrorKind, invalid, wrong_type
from gateway.exchange import Exchange
from gateway.peer_json import Json

_GET_INFO = "get_info"
_SYSTEM = f"{platform.system()} {platform.release()} {platform.machine()}"
_SHOWN: Json = [
    {
        "display_name": "Get Runtime Info",
        "tool": _GET_INFO,
        "type": "server",
        "permissions": {"write": False},
        "uses_cwd": True,
        "definition": {
            "type": "function",
            "function": {
                "name": _GET_INFO,
                "description": "Says which system this is and what the working folder is",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    }
]


async def list_tools(exchange: Exchange) -> Response:
    """GET /tools: every tool with its definition."""
    if not exchange.options.has_tools:
        return await feature_disabled(exchange)
    return json_response(_SHOWN)


async def call_tool(exchange: Exchange) -> Response:
    """POST /tools: the result of one.

    Raises:
        ApiError: The body names no tool, or one that is not here.
    """
    if not exchange.options.has_tools:
        return await feature_disabled(exchange)
    body: Any = await exchange.connection.json()
    if not isinstance(body, dict):
        raise invalid(wrong_type("object", body))
    called = cast("dict[str, Any]", body)
    name = called.get("tool")
    if not isinstance(name, str):
        raise invalid(wrong_type("string", name))
    # It has nothing to stream, which the peer answers like a tool that there is not.
    if name != _GET_INFO or called.get("stream") is True:
        raise ApiError(ErrorKind.NOT_FOUND, "no such tool")
    folder = exchange.request.headers.get("x-tool-cwd") or os.getcwd()
    return json_response({"os": _SYSTEM, "cwd": folder})

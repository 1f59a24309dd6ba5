"""Connections whose clients do not read what is sent to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.protocol import BoundedHttpProtocol, http_protocol

_LATE_S = 0.05


class _Unread(asyncio.Transport):
    """A connection that nobody reads: closing it does not end it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = asyncio.Event()
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        del name
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        del data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_cut.set()


@pytest.fixture
def unread() -> _Unread:
    return _Unread()


@pytest.fixture
async def connection(unread: _Unread) -> BoundedHttpProtocol:
    return _connected(unread)


def _connected(unread: _Unread) -> BoundedHttpProtocol:
    config = uvicorn.Config(_app, log_config=None)
    config.load()
    made = http_protocol(_LATE_S)(
        config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
    )
    made.connection_made(unread)
    return made


async def _app(scope: object, receive: object, send: object) -> None:
    """Answers nothing."""
    del scope, receive, send


async def test_a_connection_that_stays_full_is_cut(
    connection: BoundedHttpProtocol, unread: _Unread
) -> None:
    connection.pause_writing()
    await asyncio.wait_for(unread.is_cut.wait(), 30)


@pytest.mark.parametrize("way", ["idle", "bad head", "answered"])
async def test_a_connection_that_is_closed_is_cut_if_its_rest_stays_unread(
    connection: BoundedHttpProtocol, unread: _Unread, way: str
) -> None:
    if way == "idle":
        connection.timeout_keep_alive_handler()
    elif way == "bad head":
        connection.data_received(b"no head\r\n\r\n")
    else:
        connection.data_received(b"GET / HTTP/1.0\r\n\r\n")
        connection.cycle.transport.close()
    await asyncio.wait_for(unread.is_cut.wait(), 30)
    assert unread.is_closing()


async def test_a_refusal_of_a_late_head_is_not_waited_for_either(
    unread: _Unread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", _LATE_S)
    _connected(unread).data_received(b"GET")
    await asyncio.wait_for(unread.is_cut.wait(), 30)
    assert unread.is_closing()


async def test_who_reads_on_has_the_time_anew(
    connection: BoundedHttpProtocol, unread: _Unread
) -> None:
    """Slow is not stuck: as long as some of it is read, all of it may take longer."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + 3 * _LATE_S
    while loop.time() < ends_s:
        connection.pause_writing()
        connection.resume_writing()
        await asyncio.sleep(0)
    await asyncio.sleep(3 * _LATE_S)
    assert not unread.is_cut.is_set()


async def test_what_is_read_after_the_close_begins_its_time_anew(
    connection: BoundedHttpProtocol, unread: _Unread
) -> None:
    connection.pause_writing()
    connection.timeout_keep_alive_handler()
    connection.resume_writing()
    await asyncio.wait_for(unread.is_cut.wait(), 30)


@pytest.mark.parametrize("closes_after", [False, True])
async def test_a_connection_that_is_lost_is_not_kept_for_its_time(
    connection: BoundedHttpProtocol, unread: _Unread, *, closes_after: bool
) -> None:
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    cycle = connection.cycle
    connection.pause_writing()
    connection.connection_lost(None)
    if closes_after:
        cycle.transport.close()
    await asyncio.sleep(3 * _LATE_S)
    assert not unread.is_cut.is_set()

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket

import pytest

from gateway.accept_faults import AcceptFaults


def _exhausted(listener: socket.socket) -> dict[str, object]:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return {
        "message": "socket.accept() out of system resource",
        "exception": error,
        "socket": asyncio.trsock.TransportSocket(listener),  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] # what the loop passes
    }


async def test_exhaustion_is_told_once_a_minute(caplog: pytest.LogCaptureFixture):
    now_s = [0.0]
    faults = AcceptFaults(lambda: now_s[0])
    loop = asyncio.get_running_loop()
    with socket.socket() as listener, caplog.at_level(logging.ERROR):
        for now_s[0] in (0.0, 0.0, 59.0, 60.0):
            faults(loop, _exhausted(listener))
    assert caplog.messages == ["new connections must wait: Too many open files"] * 2
    assert all(record.exc_info is None for record in caplog.records)


async def test_all_else_is_reported_as_ever(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        AcceptFaults()(
            asyncio.get_running_loop(), {"message": "a bug", "exception": OSError(errno.EMFILE, "")}
        )
    assert [record.name for record in caplog.records] == ["asyncio"]
    assert caplog.messages[0].startswith("a bug")

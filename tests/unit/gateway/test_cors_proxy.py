"""What the page may fetch through the gateway, and what goes no further."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.unit.gateway.conftest import Serve
from tests.waiting import PATIENCE_S


class _Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent; /none with 204."""

    seen: dict[str, str]

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _answer(self, body: bytes) -> None:
        type(self).seen = {name.lower(): value for name, value in self.headers.items()}
        status = 204 if self.path.startswith("/none") else 418
        text = b"" if status == 204 else f"{self.command} {self.path} ".encode() + body
        self.send_response(status)
        self.send_header("content-type", "text/x-echo")
        self.send_header("x-kept", "yes")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_an_answer_comes_back_as_it_is(serve: Serve, elsewhere: str):
    async with serve(has_cors_proxy=True) as client:
        got = await client.get("/cors-proxy", params={"url": f"{elsewhere}/a?b=c"})
        assert (got.status_code, got.text) == (418, "GET /a?b=c ")
        assert (got.headers["content-type"], got.headers["x-kept"]) == ("text/x-echo", "yes")
        sent = await client.post("/cors-proxy", params={"url": elsewhere}, content=b"hello")
        assert sent.text == "POST / hello"
        nothing = await client.post("/cors-proxy", params={"url": f"{elsewhere}/none"})
        assert (nothing.status_code, nothing.content) == (204, b"")
        assert (await client.get("/props")).json()["cors_proxy_enabled"] is True


async def test_a_page_that_leaves_a_quiet_answer_holds_nobody_up(serve: Serve) -> None:
    """Closing waits for whoever reads; the reader waits for what never comes."""
    ended = asyncio.Event()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        writer.write(head + b"data: 1\n\n")
        assert await reader.read() == b""  # until the other side closes
        writer.close()
        ended.set()

    async with await asyncio.start_server(quiet, "127.0.0.1", 0) as elsewhere:
        port = elsewhere.sockets[0].getsockname()[1]
        async with serve(has_cors_proxy=True) as client:
            url = {"url": f"http://127.0.0.1:{port}/"}
            async with client.stream("GET", "/cors-proxy", params=url) as answer:
                assert await anext(answer.aiter_bytes()) == b"data: 1\n\n"
            # On the gateway's own loop here: it would stand still with it.
            async with asyncio.timeout(PATIENCE_S):
                await ended.wait()
                assert (await client.get("/health")).status_code == 200


async def test_only_marked_headers_go_on(serve: Serve, elsewhere: str):
    async with serve(has_cors_proxy=True, api_keys=("key",)) as client:
        headers = {
            "authorization": "Bearer key",
            "cookie": "secret",
            "x-llama-server-proxy-header-authorization": "Bearer other",
            "x-llama-server-proxy-header-": "nothing",
        }
        await client.get("/cors-proxy", params={"url": elsewhere}, headers=headers)
    assert _Echo.seen["authorization"] == "Bearer other"
    assert "cookie" not in _Echo.seen
    assert set(_Echo.seen) <= {"authorization", "host", "accept-encoding"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "invalid target URL: missing host"),
        ("http://", "invalid target URL: missing host"),
        ("http://a:b@c/", "authentication in target URL is not supported"),
        ("ftp://a/", "unsupported URL scheme in target URL: ftp"),
        ("file:///etc/passwd", "invalid target URL: missing host"),
        ("http://a:99999/", "invalid target URL: Port out of range"),
        ("http://127.0.0.1:1/", "proxy error: "),
        ("http://127.0.0.1:1/\r\nx: y", "proxy error: "),
    ],
)
async def test_bad_addresses(serve: Serve, url: str, message: str):
    async with serve(has_cors_proxy=True) as client:
        answer = await client.get("/cors-proxy", params={"url": url})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"].startswith(message)


async def test_it_is_off_unless_switched_on(serve: Serve, elsewhere: str):
    async with serve() as client:
        answer = await client.get("/cors-proxy", params={"url": elsewhere})
        assert answer.status_code == 403

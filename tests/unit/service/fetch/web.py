"""A small HTTP server on loopback that serves one file, in the ways that real ones misbehave."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Script:
    """What is served and how.

    `drops` cuts the next answers after so many bytes; `honours_range` False sends the whole file
    whatever was asked; `status` other than 200 refuses.
    """

    content: bytes
    drops: list[int] = field(default_factory=list[int])
    honours_range: bool = True
    status: int = 200
    ranges: list[str | None] = field(default_factory=list[str | None])


@contextmanager
def serving(script: Script) -> Generator[str]:
    """Serves until the block ends; gives the file's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, script)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/file.whl"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(handler: BaseHTTPRequestHandler, script: Script) -> None:
    asked = handler.headers.get("Range")
    script.ranges.append(asked)
    if script.status != 200:
        handler.send_error(script.status)
        return
    match = re.fullmatch(r"bytes=(\d+)-", asked or "")
    start = int(match[1]) if match and script.honours_range else 0
    if start >= len(script.content) and start:
        handler.send_response(416)
        handler.send_header("Content-Range", f"bytes */{len(script.content)}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return
    body = script.content[start:]
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: script.drops.pop(0)] if script.drops else body)

"""uvicorn's HTTP/1.1 with bounds on what a request may hold, and take, before it can be answered.

The parser itself takes a request line and headers of any length, and waits for them for ever, so a
client could fill the memory or the table of connections without ever sending a request; and it waits
for ever for one that has stopped reading its answer.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.head_spelling import SpellingTransport

MAX_HEAD_BYTES = 64 << 10
# Source: cpp-httplib, CPPHTTPLIB_HEADER_MAX_COUNT, which llama-server keeps.
MAX_HEADERS = 100
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HeadTooLarge(ValueError):
    """Ends the parsing of a head that was refused."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to a head beyond `MAX_HEAD_BYTES` or `MAX_HEADERS`, 408 to a late one.

    `head_timeout_s` runs from the connection's start, or a later head's first byte, to the head's
    end. As long may the rest of a body take that nobody reads any more, as its answer is out.
    `stall_s` is how long a client may leave the connection full, or a closed one's rest unread,
    before it is cut: to the answer's handler the client has left then.
    """

    head_timeout_s = 30.0
    stall_s = 3600.0

    # What the parser made of this request's line and headers, trailers too; and what has come since
    # it last made something of it, all of which it may be keeping.
    _parsed_bytes = 0
    _quiet_bytes = 0
    _is_in_head = True
    _num_unanswered = 0
    _limit: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # as uvicorn's own
        """Begins the time of the first head."""
        super().connection_made(transport)
        self._begin_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more.

        uvicorn lets go of its timer for the next request only where the end was in order; one that
        was reset would stay in memory until then.
        """
        self._end_limit()
        self._end_stall()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, then looks at how much it holds that is neither whole nor body."""
        if self._is_in_head:
            self._begin_limit()
        # Counted before: what becomes whole in this packet begins the count anew.
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > MAX_HEAD_BYTES:
            self._refuse_bytes()

    def on_message_begin(self) -> None:
        """A head has begun, perhaps in the packet that ended the request before."""
        self._begin_limit()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts what a head may hold that ends in the packet in which it began."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts it; one behind a body's chunks counts too."""
        self._quiet_bytes = 0
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self.send_400_response(f"The request has more than {MAX_HEADERS} headers.")
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        """The head is whole; what follows is bounded by whoever reads it."""
        self._is_in_head = False
        self._quiet_bytes = 0
        self._num_unanswered += 1
        self._end_limit()
        super().on_headers_complete()
        # The answer's task has been made but has not run.
        self.cycle.transport = SpellingTransport(self.transport, self._close)

    def on_body(self, body: bytes) -> None:
        """Whoever reads the body bounds it."""
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Another head may follow on the same connection."""
        self._is_in_head = True
        self._parsed_bytes = 0
        self._quiet_bytes = 0
        self._end_limit()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer that did not wait for its body leaves nobody to read the rest."""
        self._num_unanswered -= 1
        if not self._is_in_head:
            self._begin_limit()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than its answer comes, or no more."""
        super().pause_writing()
        self._begin_stall()

    def resume_writing(self) -> None:
        """The client has read; of a connection that is closed the rest has its time anew."""
        super().resume_writing()
        self._end_stall()
        if self.transport.is_closing():
            self._begin_stall()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that nothing more was asked on."""
        self._close()

    def send_400_response(self, msg: str) -> None:
        """Answers once, and never into the middle of another answer."""
        if self.transport.is_closing():
            # The parser complains once more of what was refused.
            return
        if self._num_unanswered > 1 or (self._num_unanswered and self.cycle.response_started):
            self._close()
            return
        super().send_400_response(msg)
        self._begin_stall()

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._refuse_bytes()
            raise HeadTooLarge

    def _refuse_bytes(self) -> None:
        self.send_400_response(f"The request's head has more than {MAX_HEAD_BYTES} bytes.")

    def _begin_limit(self) -> None:
        if self._limit is None:
            self._limit = self.loop.call_later(self.head_timeout_s, self._on_limit)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _on_limit(self) -> None:
        self._limit = None
        if self.transport.is_closing():
            return
        if self._num_unanswered:
            # What comes early, if only an empty line, must not end the answer that is under way.
            self._begin_limit()
            return
        if self._is_in_head and self._parsed_bytes + self._quiet_bytes:
            self.transport.write(_TOO_LATE)
        self._close()

    def _close(self) -> None:
        """Closes once the client has read what is still to be sent, which it may never do."""
        self.transport.close()
        self._begin_stall()

    def _begin_stall(self) -> None:
        # One that is lost already would be kept until its time is up.
        if self._stall is None and self in self.connections:
            self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def http_protocol(stall_s: float) -> type[BoundedHttpProtocol]:
    """The protocol with its time for clients that do not read; uvicorn makes one a connection."""
    return type("HttpProtocol", (BoundedHttpProtocol,), {"stall_s": stall_s})

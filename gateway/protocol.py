"""uvicorn's HTTP/1.1 with a bound on what a request may hold before its body.

The parser itself takes a request line and headers of any length, so a client could fill the memory
without ever sending a request.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to a head that is not complete after `MAX_HEAD_BYTES`."""

    _head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, then looks at how much of an unfinished head it holds."""
        # Counted before: a request that ends in this packet begins the count anew.
        self._head_bytes += len(data)
        super().data_received(data)
        is_too_long = self._is_in_head and self._head_bytes > MAX_HEAD_BYTES
        if is_too_long and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """The head is whole; what follows is bounded by whoever reads it."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Another head may follow on the same connection."""
        self._is_in_head = True
        self._head_bytes = 0
        super().on_message_complete()

"""What the service remembers of one RPC, for its log line, its metrics and its span.

The record travels in a context variable from the outermost interceptor to the servicer that
fills it. It never holds a prompt, an answer or a key, so nothing that it feeds can leak one.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Protocol

# W3C Trace Context: version-trace id-parent id-flags; version ff and zero ids are invalid.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
# Fields of a request that the loop looks through in a few milliseconds at the very worst.
_SOON_BYTES = 64 << 10
_REQUEST_ID = re.compile(r"[!-~]{1,36}")


@dataclass
class CallTrace:
    """What a span tells beside the log line.

    `parent` are the caller's headers; `method` is `/package.Service/Method`. The day's time is read
    once, at `start_ns` (since 1970); `marks_s` are the stages of a generation in seconds since
    then on a monotonic clock, so that no stage ends before it began.
    """

    method: str = ""
    parent: Mapping[str, str] = field(default_factory=dict[str, str])
    operation: str | None = None
    model: str | None = None
    settings: Mapping[str, int | float] = field(default_factory=dict[str, int | float])
    finish_reasons: list[str] = field(default_factory=list[str])
    start_ns: int = field(default_factory=time.time_ns)
    begun_s: float = field(default_factory=time.monotonic)
    marks_s: dict[str, float] = field(default_factory=dict[str, float])

    def mark(self, stage: str) -> None:
        """Notes that a stage begins; of several samples the first counts."""
        self.marks_s.setdefault(stage, time.monotonic() - self.begun_s)


@dataclass
class RpcRecord:
    """One RPC as its log line shows it; a field that stays None is left out.

    `rpc` is `Service/Method`, `tenant` the hash of a key (empty with a single tenant), durations
    are seconds on a monotonic clock. `owns_all`: the caller may act on every tenant's content.
    `request_bytes` is how long the request was, and no part of the line. A servicer sets `code` to OK as soon as the answer is whole:
    a client that goes away then has been served.
    """

    rpc: str
    request_id: str
    trace_id: str | None = None
    tenant: str = ""
    owns_all: bool = False
    code: str | None = None
    reason: str | None = None
    error_id: str | None = None
    slot_id: int | None = None
    adapters: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    request_bytes: int = 0
    trace: CallTrace = field(default_factory=CallTrace)

    @property
    def weight(self) -> int:
        """What checking the request weighs (`service.off_loop`): nothing where that is soon done."""
        return self.request_bytes if self.request_bytes > _SOON_BYTES else 0

    def fields(self) -> dict[str, object]:
        """Returns what the log line carries."""
        shown = {one.name: getattr(self, one.name) for one in fields(self)}
        del shown["owns_all"], shown["trace"], shown["request_bytes"]
        return {key: value for key, value in shown.items() if value not in (None, "")}


class Spans(Protocol):
    """Takes calls that have ended; `service.tracing` sends them to a collector."""

    def record(self, call: RpcRecord) -> None:
        """Makes the span of a call, and gives the call the trace id where it has none."""
        ...

    def close(self) -> None:
        """Sends what has not been sent; may wait for the collector for a second."""
        ...


_current: ContextVar[RpcRecord] = ContextVar("rpc_record")


def begin(record: RpcRecord) -> None:
    """Makes `record` the one of the RPC whose task calls."""
    _current.set(record)


def current() -> RpcRecord:
    """Returns the record of the RPC whose task calls.

    Raises:
        LookupError: The caller does not run under the telemetry interceptor.
    """
    return _current.get()


def mint_request_id() -> str:
    """Returns a fresh id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def is_request_id(text: str) -> bool:
    """Whether a caller may name a request so: 1 to 36 printable ASCII characters, no space."""
    return _REQUEST_ID.fullmatch(text) is not None


def trace_id(traceparent: str | None) -> str | None:
    """Returns the trace id of a `traceparent` header, None where there is no valid one.

    Source: W3C Trace Context, section 3.2 (an invalid header is ignored, not refused).
    """
    if traceparent is None:
        return None
    match = _TRACEPARENT.fullmatch(traceparent)
    return match.group(1) if match else None

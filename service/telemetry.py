"""What the service remembers of one RPC, for its log line and its metrics.

The record travels in a context variable from the outermost interceptor to the servicer that
fills it. It never holds a prompt, an answer or a key, so nothing that it feeds can leak one.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import asdict, dataclass

# W3C Trace Context: version-trace id-parent id-flags; version ff and zero ids are invalid.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_REQUEST_ID = re.compile(r"[!-~]{1,36}")


@dataclass
class RpcRecord:
    """One RPC as its log line shows it; a field that stays None is left out.

    `rpc` is `Service/Method`, `tenant` the hash of a key (empty with a single tenant), durations
    are seconds on a monotonic clock. `owns_all`: the caller may act on every tenant's content. A
    servicer sets `code` to OK as soon as the answer is whole:
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

    def fields(self) -> dict[str, object]:
        """Returns what the log line carries."""
        shown = asdict(self)
        del shown["owns_all"]
        return {key: value for key, value in shown.items() if value not in (None, "")}


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

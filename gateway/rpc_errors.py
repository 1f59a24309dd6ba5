"""What an HTTP client is told when the service refused a call or is gone.

The body is the peer's; the cause travels in the header `x-kvarts-reason`, a wait in `retry-after`.
Reasons come from the ErrorInfo of the call's status details. This module knows no route.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from gateway.errors import REASON_HEADER, ApiError, ErrorKind, ModelChanged
from gateway.peer_json import Json

_DETAILS_KEY = "grpc-status-details-bin"
_K = ErrorKind
_NOT_RESTORED = "Unable to restore slot"

# An encoder is asked for a text: the peer's 500.
_GENERATION = "text generation"
_NO_LOGITS = "the current context does not support logits computation. skipping"

# What a reason becomes over HTTP, and the peer's own words where it has some.
_BY_REASON: Mapping[str, tuple[ErrorKind, str | None]] = {
    "INVALID_FIELD": (_K.INVALID_REQUEST, None),
    "BAD_API_KEY": (_K.AUTHENTICATION, "Invalid API Key"),
    "ADMIN_ONLY": (_K.PERMISSION, None),
    "MODEL_LOADING": (_K.UNAVAILABLE, "Loading model"),
    "REBUILDING": (_K.UNAVAILABLE, None),
    "SHUTTING_DOWN": (_K.UNAVAILABLE, None),
    "INTERNAL": (_K.SERVER, None),
    "ENGINE_FAULT": (_K.SERVER, None),
    "DEADLINE": (_K.TIMEOUT, None),
    "NOT_SUPPORTED": (_K.NOT_SUPPORTED, None),
    "CONTEXT_OVERFLOW": (_K.CONTEXT_SIZE, None),
    "BATCH_OVERFLOW": (_K.SERVER, None),
    "BAD_GRAMMAR": (_K.INVALID_REQUEST, "Failed to initialize samplers: failed to parse grammar"),
    "GRAMMAR_DEAD_END": (_K.SERVER, None),
    "TOKEN_NOT_IN_VOCAB": (_K.INVALID_REQUEST, "Prompt contains invalid tokens"),
    # Told only where the request cannot be made anew for what is served now.
    "VOCABULARY_CHANGED": (_K.UNAVAILABLE, "the model was changed"),
    "QUEUE_FULL": (_K.UNAVAILABLE, None),
    "KV_PAGES_EXHAUSTED": (_K.SERVER, "Context size has been exceeded."),
    "DUPLICATE_REQUEST": (_K.CONFLICT, None),
    "NO_SUCH_SLOT": (_K.INVALID_REQUEST, None),
    "SLOT_SAVE_DISABLED": (
        _K.NOT_SUPPORTED,
        "This server does not support slots action. Start it with `--slot-save-path`",
    ),
    "SLOT_BUSY": (_K.CONFLICT, None),
    "SLOT_CONTENT_NOT_FOUND": (_K.INVALID_REQUEST, None),
    "SLOT_FILE_NOT_FOUND": (_K.INVALID_REQUEST, _NOT_RESTORED),
    "SLOT_FILE_MISMATCH": (_K.INVALID_REQUEST, _NOT_RESTORED),
    "SLOT_FILE_CORRUPT": (_K.INVALID_REQUEST, _NOT_RESTORED),
    "SLOT_CONTEXT_TOO_SMALL": (_K.INVALID_REQUEST, _NOT_RESTORED),
    "DISK_FULL": (_K.SERVER, None),
    "SLOT_IO": (_K.SERVER, None),
    "IDENTITY_PENDING": (_K.UNAVAILABLE, None),
    "MODEL_FILE_CHANGED": (_K.INVALID_REQUEST, None),
    "NO_SUCH_ADAPTER": (_K.INVALID_REQUEST, None),
    "ADAPTER_EXISTS": (_K.CONFLICT, None),
    "PATH_OUTSIDE_ROOT": (_K.PERMISSION, None),
    "ADAPTER_FILE_NOT_FOUND": (_K.NOT_FOUND, None),
    "ADAPTER_FILE_INVALID": (_K.INVALID_REQUEST, None),
    "ADAPTER_MISMATCH": (_K.INVALID_REQUEST, None),
    "RANK_TOO_LARGE": (_K.INVALID_REQUEST, None),
    "ADAPTER_ROOM": (_K.UNAVAILABLE, None),
    "ADAPTER_IN_USE": (_K.CONFLICT, None),
    "POOLS_BUSY": (_K.CONFLICT, None),
    "NO_SUCH_POOL": (_K.NOT_FOUND, None),
    "BELOW_FLOOR": (_K.INVALID_REQUEST, None),
    "TOO_LARGE": (_K.INVALID_REQUEST, None),
    "REBUILD_ROLLED_BACK": (_K.SERVER, None),
    "REBUILD_FAILED": (_K.SERVER, None),
    "MODEL_FILE_INVALID": (_K.INVALID_REQUEST, None),
    "MODEL_NOT_SUPPORTED": (_K.NOT_SUPPORTED, None),
    "MODEL_SWAP_BUSY": (_K.CONFLICT, None),
    # The peer's one 404 would not say which file.
    "MODEL_FILE_NOT_FOUND": (_K.INVALID_REQUEST, None),
    "MODEL_IN_USE": (_K.CONFLICT, None),
    "MODEL_TOO_LARGE": (_K.INVALID_REQUEST, None),
    "MODEL_ROLLED_BACK": (_K.SERVER, None),
    "MODEL_LOST": (_K.SERVER, None),
}

# For calls that ended without a reason of ours: the channel itself failed, or a bound of gRPC.
_BY_CODE: Mapping[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.INVALID_ARGUMENT: _K.INVALID_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: _K.INVALID_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: _K.TOO_LARGE,
    grpc.StatusCode.UNAUTHENTICATED: _K.AUTHENTICATION,
    grpc.StatusCode.PERMISSION_DENIED: _K.PERMISSION,
    grpc.StatusCode.UNIMPLEMENTED: _K.NOT_SUPPORTED,
    grpc.StatusCode.UNAVAILABLE: _K.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: _K.TIMEOUT,
}
_AWAY = "the service cannot be reached"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refused:
    """The details of a failed call. `reason` is "" where the service gave none."""

    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    retry_s: float | None = None


def refused(error: grpc.aio.AioRpcError) -> Refused:
    """Reads ErrorInfo and RetryInfo from the status details; unreadable details count as none."""
    for key, value in error.trailing_metadata():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return _read_details(status_pb2.Status.FromString(value))
            except DecodeError:
                return Refused()
    return Refused()


def from_restore(error: ApiError) -> ApiError:
    """The same for a restore, where a full pool is a refusal and no fault."""
    if error.body.headers.get(REASON_HEADER) != "KV_PAGES_EXHAUSTED":
        return error
    words = f"{_NOT_RESTORED}: No available space in KV cache"
    return ApiError(_K.INVALID_REQUEST, words, headers=error.body.headers)


def context_overflow(num_tokens: int, context_tokens: int) -> ApiError:
    """A prompt that leaves no room for one token in a slot's context."""
    message = (
        f"request ({num_tokens} tokens) exceeds the available context size "
        f"({context_tokens} tokens), try increasing it"
    )
    extra: dict[str, Json] = {"n_prompt_tokens": num_tokens, "n_ctx": context_tokens}
    headers = {REASON_HEADER: "CONTEXT_OVERFLOW"}
    return ApiError(_K.CONTEXT_SIZE, message, extra=extra, headers=headers)


def from_rpc(error: grpc.aio.AioRpcError) -> ApiError:
    """Turns a failed call into the peer's error body and our cause."""
    details = refused(error)
    text = _told(error, details)
    if details.reason not in _BY_REASON:
        kind = _BY_CODE.get(error.code(), ErrorKind.SERVER)
        return ApiError(kind, text, headers=_headers(details))
    kind, words = _BY_REASON[details.reason]
    message = words or text
    match details.reason:
        case "CONTEXT_OVERFLOW":
            told = details.metadata
            return context_overflow(int(told["promptTokens"]), int(told["contextTokens"]))
        case "BAD_GRAMMAR":
            message = _bad_grammar(message, text, details.metadata)
        case "NOT_SUPPORTED" if details.metadata.get("feature") == _GENERATION:
            kind, message = ErrorKind.SERVER, _NO_LOGITS
        case "VOCABULARY_CHANGED":
            return ModelChanged(kind, message, headers={"retry-after": "1"} | _headers(details))
        case _ if words == _NOT_RESTORED:
            message = f"{words}: {text}"
        case "GRAMMAR_DEAD_END":
            message = _dead_end(details.metadata)
        case _:
            pass
    return ApiError(kind, message, headers=_headers(details))


def _told(error: grpc.aio.AioRpcError, details: Refused) -> str:
    """The service's own words. gRPC's, where there are none, may name a socket's path."""
    code, text = error.code(), error.details() or ""
    if details.reason:
        return text or code.name
    _LOG.debug("a call ended with %s: %s", code.name, text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and text:
        # A message that is too large, and the limit.
        return text
    return _AWAY if code is grpc.StatusCode.UNAVAILABLE else f"the call failed: {code.name}"


def _read_details(status: status_pb2.Status) -> Refused:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_s: float | None = None
    for detail in status.details:
        if not detail.Unpack(info) and detail.Unpack(retry):
            retry_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return Refused(info.reason, dict(info.metadata), retry_s)


def _headers(details: Refused) -> dict[str, str]:
    headers: dict[str, str] = {}
    if details.reason:
        headers[REASON_HEADER] = details.reason
    if details.retry_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(details.retry_s)))
    return headers


def _bad_grammar(words: str, text: str, metadata: Mapping[str, str]) -> str:
    """The peer's words and our cause: a schema is named by its path, a grammar by its line."""
    if "path" in metadata:
        return f"JSON schema conversion failed:\n{text}"
    return f"{words}: {text}"


def _dead_end(metadata: Mapping[str, str]) -> str:
    piece, token_id = metadata["piece"], metadata["tokenId"]
    what = "Unexpected empty grammar stack after accepting piece"
    return f"got exception: {what}: {piece} ({token_id})"

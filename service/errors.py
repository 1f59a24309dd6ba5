"""The error table: which status, retry hint and details each engine failure becomes.

This is the only place that knows both an `EngineError` and a gRPC status. It must not know a
servicer, a stream or the engine's state. Reasons and codes are contract; texts are not.

Example:
    >>> to_status(ContextOverflow(prompt_tokens=900, context_tokens=512)).code
    11
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from engine.errors import EngineError, InvalidField

DOMAIN = "kvarts.v1"

# Past about 8 KB of trailers a client sees RESOURCE_EXHAUSTED instead of the error itself, and
# the status travels twice (as text and as details).
MAX_DETAILS_BYTES = 6 * 1024
_MAX_MESSAGE_BYTES = 512
_MAX_VALUE_BYTES = 256
_MAX_VIOLATIONS = 16


@dataclass(frozen=True)
class ErrorRow:
    """One row of the table. `retry_s` None: the same call would fail again, so no hint."""

    code: grpc.StatusCode
    retry_s: float | None = None


_C = grpc.StatusCode

# Source: the service's error contract (AIP-151, AIP-193, AIP-194). Retry hints are seconds.
ERROR_TABLE: Mapping[str, ErrorRow] = MappingProxyType(
    {
        # Any RPC.
        "INVALID_FIELD": ErrorRow(_C.INVALID_ARGUMENT),
        "BAD_API_KEY": ErrorRow(_C.UNAUTHENTICATED),
        "ADMIN_ONLY": ErrorRow(_C.PERMISSION_DENIED),
        "MODEL_LOADING": ErrorRow(_C.UNAVAILABLE, retry_s=1.0),
        "REBUILDING": ErrorRow(_C.UNAVAILABLE, retry_s=1.0),
        "SHUTTING_DOWN": ErrorRow(_C.UNAVAILABLE, retry_s=1.0),
        "INTERNAL": ErrorRow(_C.INTERNAL),
        "ENGINE_FAULT": ErrorRow(_C.INTERNAL),
        "DEADLINE": ErrorRow(_C.DEADLINE_EXCEEDED),
        # Generation and embeddings.
        "CONTEXT_OVERFLOW": ErrorRow(_C.OUT_OF_RANGE),
        "BAD_GRAMMAR": ErrorRow(_C.INVALID_ARGUMENT),
        "GRAMMAR_DEAD_END": ErrorRow(_C.INTERNAL),
        "TOKEN_NOT_IN_VOCAB": ErrorRow(_C.INVALID_ARGUMENT),
        "VOCABULARY_CHANGED": ErrorRow(_C.ABORTED),
        "QUEUE_FULL": ErrorRow(_C.RESOURCE_EXHAUSTED, retry_s=1.0),
        "KV_PAGES_EXHAUSTED": ErrorRow(_C.RESOURCE_EXHAUSTED, retry_s=1.0),
        "DUPLICATE_REQUEST": ErrorRow(_C.ALREADY_EXISTS),
        "NOT_SUPPORTED": ErrorRow(_C.UNIMPLEMENTED),
        # Slots.
        "NO_SUCH_SLOT": ErrorRow(_C.NOT_FOUND),
        "SLOT_SAVE_DISABLED": ErrorRow(_C.UNIMPLEMENTED),
        "SLOT_BUSY": ErrorRow(_C.ABORTED, retry_s=1.0),
        "SLOT_CONTENT_NOT_FOUND": ErrorRow(_C.NOT_FOUND),
        "SLOT_FILE_NOT_FOUND": ErrorRow(_C.NOT_FOUND),
        "SLOT_FILE_MISMATCH": ErrorRow(_C.FAILED_PRECONDITION),
        "SLOT_FILE_CORRUPT": ErrorRow(_C.DATA_LOSS),
        "SLOT_CONTEXT_TOO_SMALL": ErrorRow(_C.OUT_OF_RANGE),
        "DISK_FULL": ErrorRow(_C.RESOURCE_EXHAUSTED),
        "SLOT_IO": ErrorRow(_C.INTERNAL),
        "IDENTITY_PENDING": ErrorRow(_C.UNAVAILABLE, retry_s=1.0),
        "MODEL_FILE_CHANGED": ErrorRow(_C.FAILED_PRECONDITION),
        # Adapters.
        "NO_SUCH_ADAPTER": ErrorRow(_C.NOT_FOUND),
        "ADAPTER_EXISTS": ErrorRow(_C.ALREADY_EXISTS),
        "PATH_OUTSIDE_ROOT": ErrorRow(_C.PERMISSION_DENIED),
        "ADAPTER_FILE_NOT_FOUND": ErrorRow(_C.NOT_FOUND),
        "ADAPTER_FILE_INVALID": ErrorRow(_C.INVALID_ARGUMENT),
        "ADAPTER_MISMATCH": ErrorRow(_C.FAILED_PRECONDITION),
        "RANK_TOO_LARGE": ErrorRow(_C.OUT_OF_RANGE),
        "ADAPTER_ROOM": ErrorRow(_C.RESOURCE_EXHAUSTED),
        "ADAPTER_IN_USE": ErrorRow(_C.ABORTED, retry_s=1.0),
        # Rebuild.
        "POOLS_BUSY": ErrorRow(_C.ABORTED, retry_s=1.0),
        "NO_SUCH_POOL": ErrorRow(_C.NOT_FOUND),
        "BELOW_FLOOR": ErrorRow(_C.OUT_OF_RANGE),
        "TOO_LARGE": ErrorRow(_C.OUT_OF_RANGE),
        "REBUILD_ROLLED_BACK": ErrorRow(_C.INTERNAL),
        "REBUILD_FAILED": ErrorRow(_C.INTERNAL),
        # Embed.
        "BATCH_OVERFLOW": ErrorRow(_C.OUT_OF_RANGE),
        # Start-up, where no call sees them, and LoadModel.
        "MODEL_FILE_INVALID": ErrorRow(_C.INVALID_ARGUMENT),
        "MODEL_NOT_SUPPORTED": ErrorRow(_C.UNIMPLEMENTED),
        # LoadModel.
        "MODEL_SWAP_BUSY": ErrorRow(_C.ABORTED, retry_s=1.0),
        "MODEL_FILE_NOT_FOUND": ErrorRow(_C.NOT_FOUND),
        "MODEL_IN_USE": ErrorRow(_C.ABORTED, retry_s=1.0),
        "MODEL_TOO_LARGE": ErrorRow(_C.OUT_OF_RANGE),
        "MODEL_ROLLED_BACK": ErrorRow(_C.INTERNAL),
        "MODEL_LOST": ErrorRow(_C.INTERNAL),
    }
)


@dataclass(eq=False)
class InvalidFields(EngineError):
    """Several fields of one request are bad; `violations` lists at least one, in field order."""

    violations: tuple[InvalidField, ...]

    reason: ClassVar[str] = "INVALID_FIELD"

    def __str__(self) -> str:
        return "; ".join(str(violation) for violation in self.violations)

    def metadata(self) -> dict[str, str]:
        """Returns the first violation; the BadRequest details carry all of them."""
        return self.violations[0].metadata()


@dataclass(eq=False)
class BadApiKey(EngineError):
    """The call carries no key, or one that the server does not know."""

    reason: ClassVar[str] = "BAD_API_KEY"
    template: ClassVar[str] = "missing or unknown key in `authorization: Bearer <key>`"


@dataclass(eq=False)
class AdminOnly(EngineError):
    """The key is good, but this RPC needs the admin key."""

    method: str

    reason: ClassVar[str] = "ADMIN_ONLY"
    template: ClassVar[str] = "{method} needs the admin key"


@dataclass(eq=False)
class Internal(EngineError):
    """Anything that is a bug: the cause is in the log under `error_id`, never in the answer."""

    error_id: str

    reason: ClassVar[str] = "INTERNAL"
    template: ClassVar[str] = "internal error {error_id}"


@dataclass(eq=False)
class SlotSaveDisabled(EngineError):
    """The server was started without a folder for slot files."""

    reason: ClassVar[str] = "SLOT_SAVE_DISABLED"
    template: ClassVar[str] = "slot files need a server started with --slot-save-path"


@dataclass(eq=False)
class StalledReader(EngineError):
    """The client left its window closed for so long that the call was given up."""

    deadline_s: float

    reason: ClassVar[str] = "DEADLINE"
    template: ClassVar[str] = "the client read nothing for {deadline_s:g} s"


def to_status(error: EngineError) -> status_pb2.Status:
    """Builds the status of a failure by the table, with its details cut to what trailers hold.

    Source: google.rpc.Status, ErrorInfo, BadRequest and RetryInfo (AIP-193).

    Raises:
        KeyError: The error's reason is not in the table (a bug: the fence reports it as such).
    """
    row = ERROR_TABLE[error.reason]
    status = status_pb2.Status(code=_number(row.code), message=_cut(str(error), _MAX_MESSAGE_BYTES))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in error.metadata().items():
        info.metadata[key] = _cut(value, _MAX_VALUE_BYTES)
    _attach(status, info)
    if row.retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(row.retry_s * 1000))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    violations = _violations(error)
    if violations:
        _attach_violations(status, violations)
    return status


def _violations(error: EngineError) -> tuple[InvalidField, ...]:
    if isinstance(error, InvalidFields):
        return error.violations
    if isinstance(error, InvalidField):
        return (error,)
    return ()


def _attach_violations(status: status_pb2.Status, violations: tuple[InvalidField, ...]) -> None:
    """Adds as many violations as fit, so that a hostile request cannot hide its own error."""
    bad_request = error_details_pb2.BadRequest()
    room = MAX_DETAILS_BYTES - status.ByteSize()
    for violation in violations[:_MAX_VIOLATIONS]:
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(violation.field, _MAX_VALUE_BYTES),
            description=_cut(violation.description, _MAX_VALUE_BYTES),
            reason=violation.reason,
        )
        # The frame of the Any and of the repeated entry stays well under 128 bytes.
        if bad_request.ByteSize() + entry.ByteSize() + 128 > room:
            break
        bad_request.field_violations.append(entry)
    _attach(status, bad_request)


def _attach(status: status_pb2.Status, detail: message.Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _number(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


def _cut(text: str, limit: int) -> str:
    """Returns at most `limit` bytes of valid UTF-8 (a lone surrogate cannot be sent)."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len("…".encode())].decode("utf-8", "ignore") + "…"

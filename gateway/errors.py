"""The one exception that handlers raise, and the peer's error bodies.

A handler raises `ApiError`; the application turns it into `{"error":{code,message,type}}` with
the peer's status. Where the service refused a call, `from_rpc` keeps the peer's body and adds the
cause as the header `x-kvarts-reason`. This module knows no route and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gateway.peer_json import Json, type_name

REASON_HEADER = "x-kvarts-reason"


class ErrorKind(Enum):
    """The peer's error types and the status that each has."""

    INVALID_REQUEST = ("invalid_request_error", 400)
    CONTEXT_SIZE = ("exceed_context_size_error", 400)
    AUTHENTICATION = ("authentication_error", 401)
    PERMISSION = ("permission_error", 403)
    NOT_FOUND = ("not_found_error", 404)
    CONFLICT = ("conflict_error", 409)
    REQUEST_TIMEOUT = ("timeout_error", 408)
    TOO_LARGE = ("invalid_request_error", 413)
    SERVER = ("server_error", 500)
    NOT_SUPPORTED = ("not_supported_error", 501)
    UNAVAILABLE = ("unavailable_error", 503)
    TIMEOUT = ("timeout_error", 504)

    @property
    def type(self) -> str:
        """The value of the body's `type`."""
        return self.value[0]

    @property
    def status(self) -> int:
        """The HTTP status and the body's `code`."""
        return self.value[1]


@dataclass(frozen=True)
class ErrorBody:
    """What a client is told: the members of `error`, in the peer's order, and extra headers."""

    kind: ErrorKind
    message: str
    extra: Mapping[str, Json] = field(default_factory=dict[str, Json])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> dict[str, Json]:
        """The object under `error`."""
        return {
            "code": self.kind.status,
            "message": self.message,
            "type": self.kind.type,
            **self.extra,
        }


class ApiError(Exception):
    """A request that ends with an error body."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        extra: Mapping[str, Json] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.body = ErrorBody(kind, message, extra or {}, headers or {})


class ModelChanged(ApiError):
    """The service refused token ids of the model that it served before: make them anew."""


def invalid(message: str) -> ApiError:
    """A request that the client must change: 400."""
    return ApiError(ErrorKind.INVALID_REQUEST, message)


def server_fault(message: str) -> ApiError:
    """What the peer answers 500 to, a few malformed bodies included."""
    return ApiError(ErrorKind.SERVER, message)


def not_supported(message: str) -> ApiError:
    """A route or feature that is off, or that this build does not have: 501."""
    return ApiError(ErrorKind.NOT_SUPPORTED, message)


def wrong_type(expected: str, value: object) -> str:
    """The peer's words for a value of another JSON type."""
    return f"type must be {expected}, but is {type_name(value)}"


class FieldError(ValueError):
    """A field of a completion body that is refused; the message names it as the peer does."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"Field '{name}': {detail}")
        self.name = name

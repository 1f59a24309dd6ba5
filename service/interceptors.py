"""What surrounds every RPC: telemetry outermost, then the key check, then the error fence.

Each interceptor turns a handler into a coroutine that writes to its context. The fence is the
only code that ends a call with an error, and the only code that writes stream messages: a write
that fails or stalls is thus seen by the coroutine that drives the servicer's generator, and the
generator's `finally` runs at once, whichever way the stream died.

Reflection needs a key exactly when other calls do; health is open so that probes need none.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgen
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from engine.errors import EngineError, InvalidField
from service import telemetry
from service.deadline import CallDeadline
from service.errors import (
    ERROR_TABLE,
    AdminOnly,
    BadApiKey,
    Internal,
    StalledReader,
    to_status,
)
from service.keys import Access, KeyRing
from service.metrics import Metrics
from service.off_loop import HEAVY, on_thread
from service.stall import Stall

# grpc types a handler by its arity and its messages; here every one is treated alike. Only the
# stubs of these classes are generic, hence the quotes.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, "Context"], Awaitable[Any]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["Handler"]]

OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
ADMIN_METHODS = frozenset(
    {
        "/kvarts.v1.SlotService/SaveSlot",
        "/kvarts.v1.SlotService/RestoreSlot",
        "/kvarts.v1.SlotService/EraseSlot",
        "/kvarts.v1.SlotService/DeleteSlotFile",
        "/kvarts.v1.LoraService/SetAdapterScales",
        "/kvarts.v1.LoraService/LoadAdapter",
        "/kvarts.v1.LoraService/UnloadAdapter",
        "/kvarts.v1.RebuildService/Rebuild",
        "/kvarts.v1.ModelService/LoadModel",
    }
)
_TRACE_HEADERS = ("traceparent", "tracestate")

_LOG = logging.getLogger("kvarts.service")
_REQUESTS = logging.getLogger("kvarts.requests")


class Telemetry(grpc.aio.ServerInterceptor):
    """Names every call, then counts, traces and logs how it ended (without its content)."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        spans: telemetry.Spans | None = None,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._spans = spans

    # The stub's signature demands that a handler comes back as it went in, message types and all.
    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wraps the handler of one call; an unknown method has none and stays grpc's to refuse."""
        started_s = self._clock()
        headers = _headers(handler_call_details)
        parent = {key: headers[key] for key in _TRACE_HEADERS if key in headers}
        record = telemetry.RpcRecord(
            rpc=_short_name(handler_call_details.method),
            request_id=telemetry.mint_request_id(),
            trace_id=telemetry.trace_id(parent.get("traceparent")),
            trace=telemetry.CallTrace(handler_call_details.method, parent),
        )
        telemetry.begin(record)
        handler = await continuation(handler_call_details)
        return _wrapped(handler, lambda inner: self._measured(inner, record, started_s))

    def _measured(
        self, inner: Behaviour, record: telemetry.RpcRecord, started_s: float
    ) -> Behaviour:
        async def measured(request: Any, context: Context) -> Any:
            deadline = CallDeadline.of(context, self._clock)
            try:
                running = inner(request, context)
                del request  # see `_fenced`
                response = await running
                record.code = "OK"
                return response
            finally:
                record.code = _code_of(record, context, deadline)
                self._finish(record, started_s)

        return measured

    def _finish(self, record: telemetry.RpcRecord, started_s: float) -> None:
        assert record.code is not None
        record.duration_s = round(self._clock() - started_s, 6)
        self._metrics.observe_rpc(record.rpc, record.code, record.duration_s)
        if self._spans is not None:
            self._spans.record(record)
        _REQUESTS.info("call", extra={"fields": record.fields()})


class Auth(grpc.aio.ServerInterceptor):
    """Lets a call through by its `authorization: Bearer` key."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Replaces the handler of a refused call by one that answers the refusal."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        is_unknown = cast("object", handler) is None
        if is_unknown or method.split("/")[1] in OPEN_SERVICES:
            return handler
        grant = self._keys.judge(_bearer(_headers(handler_call_details)))
        record = telemetry.current()
        record.tenant, record.owns_all = grant.tenant, grant.owns_all
        if grant.access is Access.ADMIN:
            return handler
        if grant.access is Access.USER and method not in ADMIN_METHODS:
            return handler
        refusal = BadApiKey() if grant.access is Access.NONE else AdminOnly(_short_name(method))
        return _wrapped(handler, lambda _: _refusing(refusal))


class Fence(grpc.aio.ServerInterceptor):
    """Turns every failure into a status; nothing that is not in the error table leaves in text.

    Requests are parsed inside the fence: grpc.aio answers UNKNOWN, with the parser's own text, to
    bytes that are no message.
    """

    def __init__(self, stall_limit_s: float) -> None:
        self._stall_limit_s = stall_limit_s

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps the servicer's own handler."""
        handler = await continuation(handler_call_details)
        if cast("object", handler) is None:
            return None
        inner, build = _arity(handler)
        if handler.request_streaming:
            driven = self._driven(inner, _as_it_is)
            return build(_fenced(driven), handler.request_deserializer, handler.response_serializer)
        driven = self._driven(inner, handler.request_deserializer or _as_it_is)
        return build(_fenced(driven), None, handler.response_serializer)

    def _driven(self, inner: Behaviour, parse: Callable[[Any], Any]) -> Behaviour:
        async def driven(request: Any, context: Context) -> Any:
            try:
                message = await _parse(parse, request)
            finally:
                await _announce(context)
            result: Any = inner(message, context)
            if not isasyncgen(result):
                return await result
            async with aclosing(cast("AsyncGenerator[Any, None]", result)) as responses:
                await self._write_all(context, responses)
            return None

        return driven

    async def _write_all(self, context: Context, responses: AsyncGenerator[Any, None]) -> None:
        """Writes every message, giving up on a reader whose window stays closed for too long."""
        stall = Stall(self._stall_limit_s)
        try:
            async with stall:
                async for response in responses:
                    await stall.wait(context.write(response))
        except TimeoutError as error:
            if not stall.has_ended:
                raise
            raise StalledReader(self._stall_limit_s) from error


def _fenced(inner: Behaviour) -> Behaviour:
    """Ends a failed call with its status.

    What `abort` raises is kept by the call and keeps the frames that it passes, and those of the
    error in whose handling it is raised: a circle, which only the collector takes away, much later.
    No request, of megabytes perhaps, may hang on that.
    """

    async def fenced(request: Any, context: Context) -> Any:
        try:
            running = inner(request, context)
            del request
            return await running
        except grpc.aio.BaseError:
            # The transport failed under a write: there is nobody left to answer.
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something that it waited for was cancelled, not the call: grpc.aio would never answer.
            status = _status_of(error)
        except Exception as error:
            status = _status_of(error)
        running = None
        return await context.abort_with_status(status)

    return fenced


def _status_of(error: BaseException) -> grpc.Status:
    if not isinstance(error, EngineError) or error.reason not in ERROR_TABLE:
        error = _logged(error)
    telemetry.current().reason = error.reason
    # grpcio-status has no types.
    return rpc_status.to_status(to_status(error))  # pyright: ignore[reportUnknownMemberType]


def _logged(error: BaseException) -> Internal:
    """Logs a bug under a fresh id: its type and frames, not its text, which may quote a prompt."""
    record = telemetry.current()
    record.error_id = uuid.uuid4().hex[:12]
    frames = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("error %s: %s\n%s", record.error_id, type(error).__qualname__, frames)
    return Internal(record.error_id)


async def _parse(parse: Callable[[Any], Any], request: Any) -> Any:
    """Parses a request, a long one off the loop, and takes over the id that it may bring."""
    size = len(request) if isinstance(request, bytes) else 0
    telemetry.current().request_bytes = size
    try:
        if size > HEAVY:
            message = await on_thread(lambda: parse(request), weight=size)
        else:
            message = parse(request)
    except DecodeError as error:
        raise InvalidField("request", "the bytes are not a message of this call") from error
    own_id = getattr(message, "request_id", "")
    if isinstance(own_id, str) and telemetry.is_request_id(own_id):
        telemetry.current().request_id = own_id
    return message


def _as_it_is(request: Any) -> Any:
    return request


async def _announce(context: Context) -> None:
    await context.send_initial_metadata((("x-request-id", telemetry.current().request_id),))


def _code_of(record: telemetry.RpcRecord, context: Context, deadline: CallDeadline) -> str:
    """How a call ended: what the fence says, else what the servicer says, else by its client."""
    code = cast("object", context.code())
    if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
        return code.name
    if record.code is not None:
        return record.code
    return "DEADLINE_EXCEEDED" if deadline.has_rung else "CANCELLED"


def _refusing(error: EngineError) -> Behaviour:
    async def refuse(request: Any, context: Context) -> Any:
        await _announce(context)
        raise error

    return _fenced(refuse)


def _wrapped(handler: Handler | None, wrap: Callable[[Behaviour], Behaviour]) -> Any:
    """Returns the handler, of whatever arity, with its behaviour wrapped."""
    if handler is None:
        return None
    inner, build = _arity(handler)
    return build(wrap(inner), handler.request_deserializer, handler.response_serializer)


def _arity(handler: Handler) -> tuple[Any, Any]:
    if handler.unary_unary is not None:
        return handler.unary_unary, grpc.unary_unary_rpc_method_handler
    if handler.unary_stream is not None:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    if handler.stream_unary is not None:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    return handler.stream_stream, grpc.stream_stream_rpc_method_handler


def _headers(details: grpc.HandlerCallDetails) -> dict[str, str]:
    """The text headers of a call; of a repeated one the first, so that none can be overruled."""
    headers: dict[str, str] = {}
    for key, value in details.invocation_metadata:
        if isinstance(value, str):
            headers.setdefault(key, value)
    return headers


def _bearer(headers: dict[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _short_name(method: str) -> str:
    """`/kvarts.v1.SlotService/ListSlots` as `SlotService/ListSlots`."""
    service, _, name = method.strip("/").partition("/")
    return f"{service.rpartition('.')[2]}/{name}"

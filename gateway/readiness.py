"""Whether the service can be asked: its health is watched, its facts are read when it is ready.

Another model may be served without a moment in which it is not ready, so that is watched as well,
and tells while it is on its way: requests wait for it then (`change`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvarts.v1 import model_pb2, rebuild_pb2

from gateway.facts import Facts, gather
from gateway.model_change import ModelChange
from gateway.options import GatewayOptions
from gateway.service import Service, credentials

T = TypeVar("T")
WATCHED = "kvarts.v1.GenerationService"
_LOG = logging.getLogger(__name__)
# Between two tries to reach a service that is away. A readiness probe asks every 10 ms.
_RETRY_S = 0.05
# Between two warnings of the same cause, while tries go on at that pace.
_REMIND_S = 60.0
# Without a connection for so long, the address may be wrong; looked at every so often.
_PATIENCE_S = 5.0
_LOOK_S = 1.0
_KEY_CODES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_KEY_HINT = "; --service-key must be a key of the service"


class _HealthReply(Protocol):
    status: int


class _Refusal(Exception):
    """A call of the gateway's own failed: which one, and how."""

    def __init__(self, call: str, error: grpc.aio.AioRpcError) -> None:
        super().__init__(call)
        self.call = call
        self.error = error


class Readiness:
    """Holds the facts while the service has its model, and None while it loads or is gone.

    A service that splits its memory anew has its model and `is_serving` not: it answers what can be
    answered, and lets generations wait.

    `clock` is monotonic, in seconds, and `pause` sleeps for seconds; they only space out warnings.
    """

    def __init__(
        self,
        service: Service,
        options: GatewayOptions,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._service = service
        self._options = options
        self._clock = clock
        self._pause = pause
        self._facts: Facts | None = None
        self._is_serving = False
        self.change = ModelChange()
        self._warned_at_s: dict[object, float] = {}

    @property
    def facts(self) -> Facts | None:
        """What is known of a service that can be asked now."""
        return self._facts

    @property
    def is_serving(self) -> bool:
        """Whether it serves what it is asked without delay."""
        return self._facts is not None and self._is_serving and not self.change.is_on

    async def watch(self) -> None:
        """Follows the service until cancelled; a service that comes back is found again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._follow_models())
            tasks.create_task(self._remind())

    async def renew(self) -> None:
        """Reads the facts anew, of a service that is known to serve; a failure leaves the old."""
        try:
            await self._read()
        except _Refusal as refusal:
            self._report(refusal)

    async def _follow(self) -> None:
        while True:
            try:
                async for is_serving in self._health():
                    self._is_serving = is_serving
                    if is_serving:
                        await self._read()
                    elif self._facts is not None and not await self._has_model():
                        self._facts = None
            except _Refusal as refusal:
                self._report(refusal)
            except Exception as error:
                # Ending here would leave a gateway that says "Loading model" for ever.
                if self._is_due(type(error)):
                    _LOG.exception("not ready: an unexpected fault; trying again")
            self._facts = None
            self.change.end()
            await asyncio.sleep(_RETRY_S)

    async def _follow_models(self) -> None:
        while True:
            try:
                if self._facts is not None and not await self._watch_models():
                    return
            except Exception as error:
                # Ending here would leave a gateway that never hears of another model.
                if self._is_due(type(error)):
                    _LOG.exception("which model is served: an unexpected fault; trying again")
            await asyncio.sleep(_LOOK_S)

    async def _watch_models(self) -> bool:
        """Takes note until the stream ends; False of an older service, which never serves another."""
        try:
            async for now in self._models():
                await self._take_note(now)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
        await self._settle()
        return True

    def _models(
        self, limit_s: float | None = None
    ) -> grpc.aio.UnaryStreamCall[Any, model_pb2.WatchModelResponse]:
        key, request = credentials(self._options.service_key), model_pb2.WatchModelRequest()
        return self._service.model.WatchModel(request, metadata=key, timeout=limit_s)

    async def _take_note(self, now: model_pb2.WatchModelResponse) -> None:
        if now.changing:
            self._begin()
        elif self.change.is_on:
            await self._settle()
        else:
            await self.renew()

    async def _settle(self) -> None:
        """Ends a change, if there is one: what is served is read anew, or nothing is."""
        if not self.change.is_on:
            return
        try:
            await self._read()
        except _Refusal as refusal:
            self._facts = None
            self._report(refusal)
            self.change.end()

    async def _read(self) -> None:
        """Reads the facts anew, which ends a change; where the next one has begun requests wait on.

        Raises:
            _Refusal: The service did not tell, and changes to no other model.
        """
        while True:
            told = self.change.num_told
            try:
                self._facts = await self._gather()
            except _Refusal as refusal:
                is_away = refusal.error.code() is grpc.StatusCode.UNAVAILABLE
                now = await self._now() if is_away and self._facts is not None else None
                if now is None:
                    raise
            else:
                if told == self.change.num_told:
                    self.change.end()
                    return
                # Maybe these are facts of a model that is on its way out already.
                now = await self._now()
            if now is not None and now.changing:
                self._begin()
                return
            await asyncio.sleep(_RETRY_S)

    async def _remind(self) -> None:
        """Says whom the gateway is waiting for: a service that is not there refuses nothing."""
        connected_at_s = self._clock()
        while True:
            await self._pause(_LOOK_S)
            now_s = self._clock()
            if self._service.channel.get_state() is grpc.ChannelConnectivity.READY:
                connected_at_s = now_s
            elif now_s - connected_at_s >= _PATIENCE_S and self._is_due("no connection"):
                _LOG.warning("still waiting for the service at %s", self._options.service)

    async def _health(self) -> AsyncIterator[bool]:
        # The health package has no types.
        stub = cast(Any, health_pb2_grpc).HealthStub(self._service.channel)
        request = cast(Any, health_pb2).HealthCheckRequest(service=WATCHED)
        serving = cast(int, cast(Any, health_pb2).HealthCheckResponse.SERVING)
        replies = cast("AsyncIterator[_HealthReply]", stub.Watch(request, wait_for_ready=True))
        try:
            async for reply in replies:
                yield reply.status == serving
        except grpc.aio.AioRpcError as error:
            raise _Refusal("Health/Watch", error) from error

    async def _gather(self) -> Facts:
        key = credentials(self._options.service_key)
        stub = self._service.model
        model = await _named(
            "ModelService/GetModel", stub.GetModel(model_pb2.GetModelRequest(), metadata=key)
        )
        info = await _named(
            "ModelService/GetServerInfo",
            stub.GetServerInfo(model_pb2.GetServerInfoRequest(), metadata=key),
        )
        return gather(model.model, info.info, self._options)

    async def _has_model(self) -> bool:
        """Whether the service, which does not serve now, has its model or another on its way."""
        return await self._has_pools() or await self._has_next()

    async def _has_pools(self) -> bool:
        """Its pools say so while they are split anew."""
        key = credentials(self._options.service_key)
        try:
            reply = await self._service.rebuild.GetPools(
                rebuild_pb2.GetPoolsRequest(), metadata=key, timeout=_LOOK_S
            )
        except grpc.aio.AioRpcError:
            return False
        return reply.state != rebuild_pb2.REBUILD_STATE_UNSPECIFIED

    async def _has_next(self) -> bool:
        now = await self._now()
        if now is None:
            return False
        if now.changing:
            self._begin()
        return True

    async def _now(self) -> model_pb2.WatchModelResponse | None:
        """What is served now, None where nothing is.

        A call of its own: the other stream may tell later than health does, or have ended.
        """
        call = self._models(_PATIENCE_S)
        try:
            async for now in call:
                return now
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
        return None

    def _begin(self) -> None:
        if self._facts is not None:
            self.change.begin(self._facts.info)

    def _report(self, refusal: _Refusal) -> None:
        """Warns of what will not pass by itself, now and then while it lasts."""
        error = refusal.error
        code, text = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.UNAVAILABLE:
            _LOG.debug("the service is away: %s", text)
            return
        if not self._is_due((refusal.call, code)):
            return
        hint = _KEY_HINT if code in _KEY_CODES else ""
        _LOG.warning("not ready: %s answers %s: %s%s", refusal.call, code.name, text, hint)

    def _is_due(self, cause: object) -> bool:
        """Whether to warn of a cause now; the answer yes counts as having warned."""
        now_s = self._clock()
        if now_s - self._warned_at_s.get(cause, -math.inf) < _REMIND_S:
            return False
        self._warned_at_s[cause] = now_s
        return True


async def _named(name: str, call: Awaitable[T]) -> T:
    """Awaits a unary call; a failure tells which it was.

    Raises:
        _Refusal: the call failed.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _Refusal(name, error) from error

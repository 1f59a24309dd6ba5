"""Whether the service can be asked: its health is watched, its facts are read when it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvarts.v1 import model_pb2

from gateway.facts import Facts, gather
from gateway.options import GatewayOptions
from gateway.service import Service, credentials

WATCHED = "kvarts.v1.GenerationService"
_LOG = logging.getLogger(__name__)
# Between two tries to reach a service that is away. A readiness probe asks every 10 ms.
_RETRY_S = 0.05


class _HealthReply(Protocol):
    status: int


class Readiness:
    """Holds the facts while the service is ready, and None while it loads, rebuilds or is gone."""

    def __init__(self, service: Service, options: GatewayOptions) -> None:
        self._service = service
        self._options = options
        self._facts: Facts | None = None

    @property
    def facts(self) -> Facts | None:
        """What is known of a service that can serve now."""
        return self._facts

    async def watch(self) -> None:
        """Follows the service until cancelled; a service that comes back is found again."""
        while True:
            try:
                async for is_serving in self._health():
                    self._facts = await self._gather() if is_serving else None
            except grpc.aio.AioRpcError as error:
                _LOG.debug("the service is away: %s", error.code().name)
            self._facts = None
            await asyncio.sleep(_RETRY_S)

    async def _health(self) -> AsyncIterator[bool]:
        # The health package has no types.
        stub = cast(Any, health_pb2_grpc).HealthStub(self._service.channel)
        request = cast(Any, health_pb2).HealthCheckRequest(service=WATCHED)
        serving = cast(int, cast(Any, health_pb2).HealthCheckResponse.SERVING)
        replies = cast("AsyncIterator[_HealthReply]", stub.Watch(request, wait_for_ready=True))
        async for reply in replies:
            yield reply.status == serving

    async def _gather(self) -> Facts:
        key = credentials(self._options.service_key)
        model = await self._service.model.GetModel(model_pb2.GetModelRequest(), metadata=key)
        info = await self._service.model.GetServerInfo(
            model_pb2.GetServerInfoRequest(), metadata=key
        )
        return gather(model.model, info.info, self._options)

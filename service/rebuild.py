"""RebuildService: shows the memory pools and gives them other sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from kvarts.v1 import rebuild_pb2, rebuild_pb2_grpc

from engine.rebuild import RebuildState, RebuildWish
from service.bridge import Bridge
from service.convert import from_pool
from service.convert_pools import STATES, from_report, to_sizes
from service.metrics import Metrics
from service.telemetry import mint_request_id
from service.validate import check_rebuild

GetPoolsRequest = rebuild_pb2.GetPoolsRequest
GetPoolsResponse = rebuild_pb2.GetPoolsResponse
RebuildRequest = rebuild_pb2.RebuildRequest
RebuildResponse = rebuild_pb2.RebuildResponse


class RebuildServicer(rebuild_pb2_grpc.RebuildServiceServicer):
    """Speaks for the engine's pools."""

    def __init__(
        self, bridge: Bridge, metrics: Metrics, on_state: Callable[[RebuildState], None]
    ) -> None:
        """`on_state` hears on the event loop what the pools are doing."""
        self._bridge = bridge
        self._metrics = metrics
        self._on_state = on_state

    async def GetPools(
        self,
        request: GetPoolsRequest,
        context: grpc.aio.ServicerContext[GetPoolsRequest, GetPoolsResponse],
    ) -> GetPoolsResponse:
        """Shows all pools as they were after the last step.

        Raises:
            EngineError: The model is not there yet.
        """
        engine = self._bridge.engine
        shape, sizes = engine.pools.split()
        now = engine.snapshot()
        return GetPoolsResponse(
            pools=[from_pool(pool) for pool in now.pools],
            prefill_overlap=None if now.experts is None else now.experts.overlaps,
            budget_bytes=shape.budget_bytes(sizes),
            fixed_bytes=shape.fixed_bytes(sizes),
            state=STATES[engine.rebuilds.state],
            last_request_id=engine.rebuilds.last_request_id,
        )

    async def Rebuild(
        self,
        request: RebuildRequest,
        context: grpc.aio.ServicerContext[RebuildRequest, RebuildResponse],
    ) -> RebuildResponse:
        """Gives pools other sizes; a call that goes away stops it up to the end of the drain.

        Raises:
            EngineError: A field is bad, it was refused, or it failed.
        """
        if request.validate_only:
            return await self._rebuild(request)
        with self._metrics.rebuild():
            return await self._rebuild(request)

    async def _rebuild(self, request: RebuildRequest) -> RebuildResponse:
        engine = self._bridge.engine
        check_rebuild(request)
        loop = asyncio.get_running_loop()
        wish = RebuildWish(
            target=to_sizes(request.target),
            request_id=request.request_id or mint_request_id(),
            drain_s=request.drain_timeout.ToTimedelta().total_seconds(),
            validate_only=request.validate_only,
            on_state=lambda state: _tell(loop, self._on_state, state),
        )
        if request.validate_only:
            return from_report(await asyncio.wrap_future(engine.rebuild(wish)))
        with self._bridge.changes.change("pools"):
            return from_report(await asyncio.wrap_future(engine.rebuild(wish)))


def _tell(
    loop: asyncio.AbstractEventLoop, on_state: Callable[[RebuildState], None], state: RebuildState
) -> None:
    """From the engine thread; a loop that is closed has nobody to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_state, state)

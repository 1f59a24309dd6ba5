"""RebuildService: shows the memory pools; this build cannot re-split them."""

from __future__ import annotations

import grpc
from kvarts.v1 import rebuild_pb2, rebuild_pb2_grpc

from engine.errors import NotSupported
from service.bridge import Bridge
from service.convert import from_pool
from service.validate import check_rebuild

GetPoolsRequest = rebuild_pb2.GetPoolsRequest
GetPoolsResponse = rebuild_pb2.GetPoolsResponse
RebuildRequest = rebuild_pb2.RebuildRequest
RebuildResponse = rebuild_pb2.RebuildResponse


class RebuildServicer(rebuild_pb2_grpc.RebuildServiceServicer):
    """Speaks for the engine's pools."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def GetPools(
        self,
        request: GetPoolsRequest,
        context: grpc.aio.ServicerContext[GetPoolsRequest, GetPoolsResponse],
    ) -> GetPoolsResponse:
        """Shows all pools as they were after the last step.

        Sizes cannot change, so the budget is what the pools take.

        Raises:
            EngineError: The model is not there yet.
        """
        pools = self._bridge.engine.snapshot().pools
        return GetPoolsResponse(
            pools=[from_pool(pool) for pool in pools],
            budget_bytes=sum(pool.size * pool.unit_bytes for pool in pools),
            state=rebuild_pb2.REBUILD_STATE_SERVING,
        )

    async def Rebuild(
        self,
        request: RebuildRequest,
        context: grpc.aio.ServicerContext[RebuildRequest, RebuildResponse],
    ) -> RebuildResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else NotSupported.
        """
        _ = self._bridge.model
        check_rebuild(request)
        raise NotSupported("rebuild")

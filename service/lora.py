"""LoraService: this build loads no adapters; the list of them is truthfully empty."""

from __future__ import annotations

import grpc
from kvarts.v1 import lora_pb2, lora_pb2_grpc

from engine.errors import NotSupported
from service.bridge import Bridge
from service.faults import Faults
from service.validate import check_adapters, check_load_adapter

ListRequest = lora_pb2.ListAdaptersRequest
ListResponse = lora_pb2.ListAdaptersResponse
ScalesRequest = lora_pb2.SetAdapterScalesRequest
ScalesResponse = lora_pb2.SetAdapterScalesResponse
LoadRequest = lora_pb2.LoadAdapterRequest
LoadResponse = lora_pb2.LoadAdapterResponse
UnloadRequest = lora_pb2.UnloadAdapterRequest
UnloadResponse = lora_pb2.UnloadAdapterResponse

_FEATURE = "adapters"


class LoraServicer(lora_pb2_grpc.LoraServiceServicer):
    """Checks requests as it will when it can serve them."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def ListAdapters(
        self, request: ListRequest, context: grpc.aio.ServicerContext[ListRequest, ListResponse]
    ) -> ListResponse:
        """Lists what is loaded: nothing, and there is room for nothing.

        Raises:
            EngineError: The model is not there yet.
        """
        _ = self._bridge.model
        return ListResponse()

    async def SetAdapterScales(
        self,
        request: ScalesRequest,
        context: grpc.aio.ServicerContext[ScalesRequest, ScalesResponse],
    ) -> ScalesResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else NotSupported.
        """
        _ = self._bridge.model
        faults = Faults()
        if not request.HasField("scales"):
            faults.add("scales", "missing")
        check_adapters(faults, "scales", request.scales)
        faults.raise_if_any()
        raise NotSupported(_FEATURE)

    async def LoadAdapter(
        self, request: LoadRequest, context: grpc.aio.ServicerContext[LoadRequest, LoadResponse]
    ) -> LoadResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else NotSupported.
        """
        _ = self._bridge.model
        check_load_adapter(request)
        raise NotSupported(_FEATURE)

    async def UnloadAdapter(
        self,
        request: UnloadRequest,
        context: grpc.aio.ServicerContext[UnloadRequest, UnloadResponse],
    ) -> UnloadResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else NotSupported.
        """
        _ = self._bridge.model
        faults = Faults()
        if not request.HasField("adapter_id"):
            faults.add("adapter_id", "missing")
        faults.raise_if_any()
        raise NotSupported(_FEATURE)

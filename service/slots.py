"""SlotService: lists and empties slots. Saving and restoring them is refused by name."""

from __future__ import annotations

import grpc
from kvarts.v1 import slot_pb2, slot_pb2_grpc

from engine.errors import EngineError, NoSuchSlot, NotSupported
from service import telemetry
from service.bridge import Bridge
from service.convert import from_slot
from service.errors import SlotSaveDisabled
from service.faults import Faults
from service.metrics import Metrics
from service.validate import check_filename, check_page, check_save, check_slot_id, limits_of

ListRequest = slot_pb2.ListSlotsRequest
ListResponse = slot_pb2.ListSlotsResponse
SaveRequest = slot_pb2.SaveSlotRequest
SaveResponse = slot_pb2.SaveSlotResponse
RestoreRequest = slot_pb2.RestoreSlotRequest
RestoreResponse = slot_pb2.RestoreSlotResponse
EraseRequest = slot_pb2.EraseSlotRequest
EraseResponse = slot_pb2.EraseSlotResponse
FilesRequest = slot_pb2.ListSlotFilesRequest
FilesResponse = slot_pb2.ListSlotFilesResponse
DeleteRequest = slot_pb2.DeleteSlotFileRequest
DeleteResponse = slot_pb2.DeleteSlotFileResponse


class SlotServicer(slot_pb2_grpc.SlotServiceServicer):
    """Speaks for the engine's slots; `has_folder` says that a folder for slot files was given."""

    def __init__(self, bridge: Bridge, metrics: Metrics, *, has_folder: bool = False) -> None:
        self._bridge = bridge
        self._metrics = metrics
        self._has_folder = has_folder

    async def ListSlots(
        self, request: ListRequest, context: grpc.aio.ServicerContext[ListRequest, ListResponse]
    ) -> ListResponse:
        """Lists all slots as they were after the last step.

        Raises:
            EngineError: The model is not there yet.
        """
        return ListResponse(slots=[from_slot(s) for s in self._bridge.engine.snapshot().slots])

    async def EraseSlot(
        self, request: EraseRequest, context: grpc.aio.ServicerContext[EraseRequest, EraseResponse]
    ) -> EraseResponse:
        """Empties a slot, waiting within the deadline while it is in use.

        Raises:
            EngineError: The request was refused.
        """
        with self._metrics.slot_op("erase"):
            _ = self._bridge.model
            faults = Faults()
            check_slot_id(faults, request)
            faults.raise_if_any()
            caller = telemetry.current()
            erased = await self._bridge.erase(
                request.slot_id,
                fail_if_busy=request.fail_if_busy,
                tenant=None if caller.owns_all else caller.tenant,
            )
        return EraseResponse(
            slot_id=erased.slot_id, erased_tokens=erased.tokens, freed_pages=erased.pages
        )

    async def SaveSlot(
        self, request: SaveRequest, context: grpc.aio.ServicerContext[SaveRequest, SaveResponse]
    ) -> SaveResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else SlotSaveDisabled or, with a folder, NotSupported.
        """
        limits = limits_of(self._bridge.model)
        check_save(request, limits)
        _require_slot(request.slot_id, limits.num_slots)
        raise self._refusal("saving a slot")

    async def RestoreSlot(
        self,
        request: RestoreRequest,
        context: grpc.aio.ServicerContext[RestoreRequest, RestoreResponse],
    ) -> RestoreResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else SlotSaveDisabled or, with a folder, NotSupported.
        """
        limits = limits_of(self._bridge.model)
        faults = Faults()
        check_slot_id(faults, request)
        check_filename(faults, "filename", request.filename)
        faults.raise_if_any()
        _require_slot(request.slot_id, limits.num_slots)
        raise self._refusal("restoring a slot")

    async def ListSlotFiles(
        self, request: FilesRequest, context: grpc.aio.ServicerContext[FilesRequest, FilesResponse]
    ) -> FilesResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else SlotSaveDisabled or, with a folder, NotSupported.
        """
        _ = self._bridge.model
        check_page(request)
        raise self._refusal("listing slot files")

    async def DeleteSlotFile(
        self,
        request: DeleteRequest,
        context: grpc.aio.ServicerContext[DeleteRequest, DeleteResponse],
    ) -> DeleteResponse:
        """Refuses.

        Raises:
            EngineError: A field is bad; else SlotSaveDisabled or, with a folder, NotSupported.
        """
        _ = self._bridge.model
        faults = Faults()
        check_filename(faults, "filename", request.filename)
        faults.raise_if_any()
        raise self._refusal("deleting a slot file")

    def _refusal(self, feature: str) -> EngineError:
        return NotSupported(feature) if self._has_folder else SlotSaveDisabled()


def _require_slot(slot_id: int, num_slots: int) -> None:
    if slot_id >= num_slots:
        raise NoSuchSlot(slot_id, num_slots)

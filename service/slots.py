"""SlotService: lists, saves, restores and empties slots, and keeps the files of saved ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar, cast

import grpc
from kvarts.v1 import error_reason_pb2, slot_pb2, slot_pb2_grpc

from engine.errors import InvalidField, NoSuchSlot, NotSupported
from engine.requests import Request
from engine.scheduling.wishes import Restore, Save
from engine.slots.errors import IdentityPending
from engine.slots.identity import Identity
from engine.slots.store import SlotStore, StoredSlot
from engine.types import Finished, Started
from engine.validation import ENCODER_SLOTS
from service import convert, telemetry
from service.bridge import Bridge
from service.deadline import CallDeadline
from service.errors import SlotSaveDisabled
from service.faults import Faults
from service.loaded import LoadedModel
from service.metrics import Metrics
from service.prompt import Prompt, read_prompt
from service.validate import (
    MAX_PAGE_SIZE,
    check_filename,
    check_page,
    check_save,
    check_slot_id,
    check_vocabulary,
    limits_of,
)

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
Context = grpc.aio.ServicerContext[Any, Any]
Result = TypeVar("Result")

_FILE_THREADS = 2
# Left of a deadline for the answer that the identity is not there yet.
_ANSWER_S = 0.1


class SlotServicer(slot_pb2_grpc.SlotServiceServicer):
    """Speaks for the engine's slots."""

    def __init__(self, bridge: Bridge, metrics: Metrics) -> None:
        self._bridge = bridge
        self._metrics = metrics
        self._files = ThreadPoolExecutor(_FILE_THREADS, "slot-list")

    async def ListSlots(
        self, request: ListRequest, context: grpc.aio.ServicerContext[ListRequest, ListResponse]
    ) -> ListResponse:
        """Lists all slots as they were after the last step.

        Raises:
            EngineError: The model is not there yet.
        """
        slots = self._bridge.engine.snapshot().slots
        return ListResponse(slots=[convert.from_slot(slot) for slot in slots])

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
            erased = await self._bridge.erase(
                request.slot_id, fail_if_busy=request.fail_if_busy, tenant=_owner()
            )
        return EraseResponse(
            slot_id=erased.slot_id, erased_tokens=erased.tokens, freed_pages=erased.pages
        )

    async def SaveSlot(
        self, request: SaveRequest, context: grpc.aio.ServicerContext[SaveRequest, SaveResponse]
    ) -> SaveResponse:
        """Writes what a slot holds to a file or, with a prompt, that prompt's state.

        Raises:
            EngineError: The request was refused or failed.
        """
        with self._metrics.slot_op("save"), self._bridge.use() as model:
            check_vocabulary(request.vocabulary, model)
            check_save(request, limits_of(model))
            _require_slot(request.slot_id, model)
            store = _store(model)
            prompt = await _prompt(request, model)
            tenant = telemetry.current().tenant
            fingerprint = await _fingerprint(store.identity, context)
            order = store.save_order(request.filename, tenant, fingerprint)
            save = Save(request.slot_id, order, request.fail_if_busy, _owner())
            if prompt is None:
                saved = await self._bridge.save(save, model)
                return convert.from_saved(saved, request.filename)
            cause = CallDeadline.of(context).cause
            response = SaveResponse()
            warming = _warming(request, prompt, model, context)
            running = self._bridge.events([warming], cause, save=save, model=model)
            with prompt.counted():
                async with aclosing(running) as events:
                    async for _, event in events:
                        _observe(response, event)
            saved = await self._bridge.outcome(save)
            response.MergeFrom(convert.from_saved(saved, request.filename))
            return response

    async def RestoreSlot(
        self,
        request: RestoreRequest,
        context: grpc.aio.ServicerContext[RestoreRequest, RestoreResponse],
    ) -> RestoreResponse:
        """Reads a file into a slot; a refusal leaves the slot as it was.

        Raises:
            EngineError: The request was refused.
        """
        with self._metrics.slot_op("restore"), self._bridge.use() as model:
            faults = Faults()
            check_slot_id(faults, request)
            check_filename(faults, "filename", request.filename)
            faults.raise_if_any()
            _require_slot(request.slot_id, model)
            store = _store(model)
            caller = telemetry.current()
            name, tenant, owns_all = request.filename, caller.tenant, caller.owns_all
            await self._on_thread(lambda: store.refuse_early(name, tenant, owns_all=owns_all))
            fingerprint = await _fingerprint(store.identity, context)
            order = store.restore_order(name, tenant, fingerprint, owns_all=owns_all)
            restored = await self._bridge.restore(
                Restore(request.slot_id, order, request.fail_if_busy), model
            )
        return convert.from_restored(restored, request.filename)

    async def ListSlotFiles(
        self, request: FilesRequest, context: grpc.aio.ServicerContext[FilesRequest, FilesResponse]
    ) -> FilesResponse:
        """Lists the caller's saved slots by name, each with why it could not be restored now.

        Raises:
            EngineError: The request was refused.
        """
        model = self._bridge.model
        check_page(request)
        store, caller = _store(model), telemetry.current()
        limit = request.page_size or MAX_PAGE_SIZE
        files, has_more = await self._on_thread(
            lambda: store.list(
                caller.tenant, after=request.page_token, limit=limit, owns_all=caller.owns_all
            )
        )
        return FilesResponse(
            files=[_file(each) for each in files],
            next_page_token=files[-1].file.filename if has_more else "",
        )

    async def DeleteSlotFile(
        self,
        request: DeleteRequest,
        context: grpc.aio.ServicerContext[DeleteRequest, DeleteResponse],
    ) -> DeleteResponse:
        """Deletes one of the caller's saved slots.

        Raises:
            EngineError: The request was refused.
        """
        with self._metrics.slot_op("delete"):
            model = self._bridge.model
            faults = Faults()
            check_filename(faults, "filename", request.filename)
            faults.raise_if_any()
            store, tenant = _store(model), telemetry.current().tenant
            size = await self._on_thread(lambda: store.delete(request.filename, tenant))
        return DeleteResponse(size_bytes=size)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        """Runs file work on threads that nothing else waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)


def _store(model: LoadedModel) -> SlotStore:
    if model.slot_store is None:
        raise SlotSaveDisabled
    return model.slot_store


def _owner() -> str | None:
    """Whose content the caller may touch; None is everybody's."""
    caller = telemetry.current()
    return None if caller.owns_all else caller.tenant


def _require_slot(slot_id: int, model: LoadedModel) -> None:
    if model.engine.is_encoder:
        raise NotSupported(ENCODER_SLOTS)
    num_slots = limits_of(model).num_slots
    if slot_id >= num_slots:
        raise NoSuchSlot(slot_id, num_slots)


async def _fingerprint(identity: Identity, context: Context) -> str:
    """Waits for the model's fingerprint as long as the deadline allows.

    Raises:
        IdentityPending: It was not there in time.
        ModelFileChanged: It cannot be had.
    """
    left_s = _time_left(context)
    timeout_s = None if left_s is None else max(0.0, left_s - _ANSWER_S)
    with identity.waiting() as done:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), timeout_s)
        except TimeoutError:
            raise IdentityPending from None


def _time_left(context: Context) -> float | None:
    # The stub promises a float; a call without a deadline answers None.
    return cast("float | None", context.time_remaining())


async def _prompt(request: SaveRequest, model: LoadedModel) -> Prompt | None:
    """The prompt that is to be computed, None where there is none.

    Raises:
        InvalidField: The prompt has no tokens.
        EngineError: As Generate.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        return None
    prompt = await read_prompt(request, model)
    if not prompt.tokens:
        raise InvalidField(kind, "a prompt of no tokens")
    return prompt


def _warming(request: SaveRequest, prompt: Prompt, model: LoadedModel, context: Context) -> Request:
    record = telemetry.current()
    left_s = _time_left(context)
    return Request(
        request_id=record.request_id,
        prompt=tuple(prompt.tokens),
        max_tokens=0,
        slot_id=request.slot_id,
        adapters=convert.to_adapters(request.adapters) if request.HasField("adapters") else None,
        deadline_s=None if left_s is None else model.engine.now_s() + left_s,
        tenant=record.tenant,
        group=record.request_id,
        is_warming=True,
    )


def _observe(response: SaveResponse, event: object) -> None:
    """Takes down what computing the prompt showed, for the answer and the call's log line."""
    record = telemetry.current()
    match event:
        case Started():
            record.slot_id = event.slot_id
            record.prompt_tokens = event.prompt_tokens
            record.cached_tokens = event.cached_tokens
            response.cached_tokens = event.cached_tokens
            response.cache_source = convert.from_source(event.cache_source)
            response.no_reuse_reason = event.no_reuse
        case Finished():
            record.queue_s = round(event.queue_s, 6)
            response.prefill_duration.CopyFrom(convert.to_duration(event.prefill_s))
        case _:
            pass


def _file(stored: StoredSlot) -> slot_pb2.SlotFile:
    message = slot_pb2.SlotFile(
        filename=stored.file.filename,
        size_bytes=stored.file.size_bytes,
        num_tokens=stored.num_tokens,
        model_name=stored.model_name,
        model_fingerprint=stored.fingerprint,
    )
    message.modified_time.FromNanoseconds(stored.file.modified_ns)
    if stored.refusal is not None:
        name = f"ERROR_REASON_{stored.refusal.reason}"
        message.refusal = error_reason_pb2.ErrorReason.Value(name)
    return message

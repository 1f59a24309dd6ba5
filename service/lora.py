"""LoraService: adapters loaded, listed, scaled and unloaded while the server runs."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import grpc
from kvarts.v1 import lora_pb2, lora_pb2_grpc

from engine.adapters.desk import AdapterDesk
from engine.adapters.errors import AdapterInUse
from engine.adapters.loaded import NewAdapter, describe_adapter
from engine.adapters.source import resolve_adapter
from engine.errors import NotSupported
from engine.types import AdapterInfo
from engine.validation import ENCODER_ADAPTERS
from service.bridge import Bridge
from service.convert import to_adapters
from service.convert_adapters import from_adapter
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

# An answer takes this part of the time that is left, so that it arrives within the deadline.
_ANSWER_SHARE, _ANSWER_S = 0.1, 0.25


class LoraServicer(lora_pb2_grpc.LoraServiceServicer):
    """Speaks for the engine's adapters; `folder` is where LoadAdapter finds files, None for none."""

    def __init__(self, bridge: Bridge, folder: str | None = None) -> None:
        self._bridge = bridge
        self._folder = folder
        # One file at a time: what is read lies in memory until it is attached.
        self._reading = asyncio.Lock()

    async def ListAdapters(
        self, request: ListRequest, context: grpc.aio.ServicerContext[ListRequest, ListResponse]
    ) -> ListResponse:
        """Lists what is loaded and the room for more.

        Raises:
            EngineError: The model is not there yet.
        """
        setup = self._desk.setup
        return ListResponse(
            adapters=self._adapters(),
            max_adapters=setup.capacity.count,
            max_rank=setup.capacity.rank if setup.capacity.count else 0,
            bank_bytes=setup.bank_bytes,
            place_bytes=setup.place_bytes if setup.capacity.count else 0,
            free_bytes=self._desk.free_bytes,
        )

    async def SetAdapterScales(
        self,
        request: ScalesRequest,
        context: grpc.aio.ServicerContext[ScalesRequest, ScalesResponse],
    ) -> ScalesResponse:
        """Replaces the server's set for requests that are admitted from now on.

        Raises:
            EngineError: A field is bad, or an adapter is not loaded; nothing is changed then.
        """
        desk = self._changeable()
        faults = Faults()
        if not request.HasField("scales"):
            faults.add("scales", "missing")
        check_adapters(faults, "scales", request.scales)
        faults.raise_if_any()
        with self._changing():
            await asyncio.wrap_future(desk.set_scales(to_adapters(request.scales)))
        return ScalesResponse(adapters=self._adapters())

    async def LoadAdapter(
        self, request: LoadRequest, context: grpc.aio.ServicerContext[LoadRequest, LoadResponse]
    ) -> LoadResponse:
        """Reads, checks and attaches an adapter; the same name and content again is that adapter.

        Raises:
            EngineError: The request or the file was refused; nothing is attached then.
        """
        desk = self._changeable()
        check_load_adapter(request)
        if self._folder is None:
            raise NotSupported("adapters at run time: the server has no --lora-dir")
        if not desk.setup.capacity.count:
            raise NotSupported("adapters: the server was started with room for none")
        scale = request.scale if request.HasField("scale") else 1.0
        with self._changing():
            async with self._reading:
                desk.check_room(request.name)
                new = await asyncio.to_thread(_read, desk, Path(self._folder), request, scale)
                loaded = await asyncio.wrap_future(desk.load(new))
        known = (info for info in self._infos() if info.adapter_id == loaded.adapter_id)
        # It may be gone again by now; then this is what it was.
        info = next(known, describe_adapter(loaded, 0))
        return LoadResponse(adapter=from_adapter(info, self._bridge.model.tokenizer))

    async def UnloadAdapter(
        self,
        request: UnloadRequest,
        context: grpc.aio.ServicerContext[UnloadRequest, UnloadResponse],
    ) -> UnloadResponse:
        """Unloads an adapter, waiting within the deadline while requests use it.

        Raises:
            EngineError: A field is bad, it is not loaded, or it is in use.
        """
        desk = self._changeable()
        faults = Faults()
        if not request.HasField("adapter_id"):
            faults.add("adapter_id", "missing")
        faults.raise_if_any()
        adapter_id = request.adapter_id
        with self._changing():
            done = desk.unload(adapter_id, fail_if_busy=request.fail_if_busy)
            try:
                freed = await asyncio.wait_for(asyncio.wrap_future(done), _patience_s(context))
            except TimeoutError:
                if not done.cancelled():
                    # It was being done in that moment.
                    return UnloadResponse(freed_bytes=await asyncio.to_thread(done.result))
                users = [a.active_requests for a in self._infos() if a.adapter_id == adapter_id]
                raise AdapterInUse(adapter_id, max([1, *users])) from None
        return UnloadResponse(freed_bytes=freed)

    def _changing(self) -> AbstractContextManager[None]:
        return self._bridge.changes.change("adapters")

    def _changeable(self) -> AdapterDesk:
        if self._bridge.model.engine.is_encoder:
            raise NotSupported(ENCODER_ADAPTERS)
        return self._desk

    @property
    def _desk(self) -> AdapterDesk:
        return self._bridge.engine.adapters

    def _infos(self) -> tuple[AdapterInfo, ...]:
        return self._bridge.engine.snapshot().adapters

    def _adapters(self) -> list[lora_pb2.Adapter]:
        tokenizer = self._bridge.model.tokenizer
        return [from_adapter(info, tokenizer) for info in self._infos()]


def _read(desk: AdapterDesk, folder: Path, request: LoadRequest, scale: float) -> NewAdapter:
    source = resolve_adapter(folder, request.path)
    return NewAdapter(request.name, request.path, scale, desk.read(source), source)


def _patience_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """How long a call may wait so that its answer still comes in time; None is for ever."""
    left_s = cast("float | None", context.time_remaining())
    if left_s is None:
        return None
    return max(0.0, left_s - min(_ANSWER_S, _ANSWER_SHARE * left_s))

"""A generated client of a running service, and what it must report when nothing runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from kvarts.v1 import (
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    slot_pb2,
    slot_pb2_grpc,
)

from tests.waiting import until

Metadata = tuple[tuple[str, str], ...]


def bearer(key: str | None) -> Metadata:
    """The metadata of a call with this key."""
    return () if key is None else (("authorization", f"Bearer {key}"),)


@dataclass(frozen=True)
class Client:
    """The stubs of one channel, and the key that its calls carry."""

    generation: generation_pb2_grpc.GenerationServiceAsyncStub
    model: model_pb2_grpc.ModelServiceAsyncStub
    slots: slot_pb2_grpc.SlotServiceAsyncStub
    metadata: Metadata

    async def info(self) -> model_pb2.ServerInfo:
        request = model_pb2.GetServerInfoRequest()
        return (await self.model.GetServerInfo(request, metadata=self.metadata)).info

    async def running(self, count: int) -> None:
        """Waits until exactly so many requests are in slots."""
        await until(self.info, lambda info: info.gauges.running_requests == count)

    async def queued(self, count: int) -> None:
        """Waits until exactly so many requests wait for a slot."""
        await until(self.info, lambda info: info.gauges.queued_requests == count)

    async def cancelled(self, count: int) -> None:
        """Waits until so many requests in all were cancelled."""
        await until(self.info, lambda info: info.counters.requests_cancelled >= count)

    async def idle(self) -> None:
        """Waits until nothing runs, then demands that nothing is held by a request."""
        info = await until(self.info, _is_idle)
        for pool in info.pools:
            assert pool.used == 0, pool
            assert pool.free + pool.pinned + pool.cached == pool.size, pool
        request = slot_pb2.ListSlotsRequest()
        listed = await self.slots.ListSlots(request, metadata=self.metadata)
        states = [slot.state for slot in listed.slots]
        assert states == [slot_pb2.SLOT_STATE_IDLE] * info.num_slots


def _is_idle(info: model_pb2.ServerInfo) -> bool:
    return not info.gauges.running_requests and not info.gauges.queued_requests


@asynccontextmanager
async def client(address: str, key: str | None = None) -> AsyncGenerator[Client]:
    """A client of the service at `address`, in plain text."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield Client(
            generation_pb2_grpc.GenerationServiceStub(channel),
            model_pb2_grpc.ModelServiceStub(channel),
            slot_pb2_grpc.SlotServiceStub(channel),
            bearer(key),
        )

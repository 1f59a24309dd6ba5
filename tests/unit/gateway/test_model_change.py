"""Requests that wait for the next model: how many, how large, how long, and what ends their wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from kvarts.v1 import model_pb2
from starlette.requests import Request
from starlette.types import Message

from gateway.connection import Connection
from gateway.errors import ApiError
from gateway.model_change import ModelChange
from gateway.presence import ClientGone
from tests.unit.gateway.conftest import Serve, until_changing, until_ready
from tests.unit.gateway.fake_service import FakeService, failing
from tests.waiting import until_so

INFO = model_pb2.ServerInfo(queue_limit=2, queue_limit_bytes=10)


class Client:
    """A client that sends its body in parts, and leaves when it is told to."""

    def __init__(self, parts: Sequence[bytes] = (b"ab",)) -> None:
        self._parts = [*parts]
        self._gone = asyncio.Event()
        self.has_sent = asyncio.Event()
        self.connection = Connection(Request({"type": "http"}, self._receive), 30.0)

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> Message:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        self.has_sent.set()
        await self._gone.wait()
        return {"type": "http.disconnect"}


async def waiting(change: ModelChange, client: Client) -> asyncio.Task[None]:
    task = asyncio.create_task(change.wait(client.connection))
    await client.has_sent.wait()
    return task


@pytest.fixture(name="change")
def _change() -> ModelChange:
    change = ModelChange()
    change.begin(INFO)
    return change


async def test_a_request_goes_on_with_its_body_when_the_change_is_over(change: ModelChange):
    client = Client((b"abc", b"", b"de"))
    task = await waiting(change, client)
    assert (change.is_on, change.num_waiting, task.done()) == (True, 1, False)
    change.end()
    await task
    assert (change.is_on, change.num_waiting) == (False, 0)
    assert await client.connection.body() == b"abcde"
    assert client.connection.body_bytes == 5


async def test_no_more_requests_wait_than_may_queue(change: ModelChange):
    tasks = [await waiting(change, Client()) for _ in range(2)]
    with pytest.raises(ApiError) as refused:
        await change.wait(Client().connection)
    assert refused.value.body.kind.status == 503
    assert refused.value.body.headers == {"x-kvarts-reason": "QUEUE_FULL", "retry-after": "1"}
    assert refused.value.body.message == "the queue is full: 2 queued, limit 2"
    change.end()
    await asyncio.gather(*tasks)


async def test_bytes_are_counted_as_they_come_and_given_back(change: ModelChange):
    first = await waiting(change, Client((b"1234", b"56")))
    with pytest.raises(ApiError, match="the queue is full: 11 queued, limit 10"):
        await change.wait(Client((b"123", b"45", b"6789")).connection)
    assert change.num_waiting == 1
    second = await waiting(change, Client((b"7890",)))
    change.end()
    await asyncio.gather(first, second)
    change.begin(INFO)
    third = await waiting(change, Client((b"1234567890",)))
    change.end()
    await third


async def test_a_client_that_leaves_gives_its_place_back(change: ModelChange):
    client = Client()
    task = await waiting(change, client)
    client.leave()
    with pytest.raises(ClientGone):
        await task
    assert change.num_waiting == 0


async def test_a_wait_that_is_too_long_ends():
    change = ModelChange(limit_s=0.0)
    change.begin(INFO)
    with pytest.raises(ApiError, match="Loading model") as ended:
        await change.wait(Client().connection)
    assert ended.value.body.headers["x-kvarts-reason"] == "MODEL_LOADING"
    assert change.num_waiting == 0


async def test_what_waits_stays_when_the_same_change_is_told_twice(change: ModelChange):
    task = await waiting(change, Client())
    change.begin(INFO)
    change.end()
    await task


async def test_what_waits_waits_on_when_the_next_change_begins_as_one_ends(change: ModelChange):
    client = Client()
    task = await waiting(change, client)
    change.end()
    change.begin(INFO)
    # Whoever had gone on would never hear of it.
    client.leave()
    with pytest.raises(ClientGone):
        await task


async def test_a_request_that_was_read_waits_once_more(change: ModelChange):
    client = Client((b"12345", b"67890"))
    task = await waiting(change, client)
    change.end()
    await task
    assert await client.connection.body() == b"1234567890"
    change.begin(INFO)
    again = asyncio.create_task(change.wait(client.connection))
    await until_so(lambda: change.num_waiting == 1)
    with pytest.raises(ApiError, match="the queue is full: 12 queued, limit 10"):
        await change.wait(Client((b"ab",)).connection)
    change.end()
    await again


async def asked_for_model(service: FakeService) -> None:
    while await service.model_calls.get() != "GetModel":
        pass


@pytest.mark.parametrize("teller", ["models", "health"])
async def test_requests_are_held_when_a_second_change_begins_as_the_first_ends(
    service: FakeService, serve: Serve, teller: str
):
    """The model that the gateway hears of is on its way out before it can be asked about."""
    service.tenures = [model_pb2.WatchModelResponse(model_id="old")]
    async with serve() as client:
        # Once as it becomes ready, once as it is told of the model: it listens now.
        await asked_for_model(service)
        await asked_for_model(service)
        await service.tell_tenure("old", changing=True)
        await service.set_serving(False)
        await until_changing(client)
        task = asyncio.create_task(client.post("/tokenize", json={"content": "ab"}))
        loading = failing(grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING", "the model is loading")
        service.refusals["GetModel"] = loading
        service.tenures += [
            model_pb2.WatchModelResponse(model_id="next"),
            model_pb2.WatchModelResponse(model_id="next", changing=True),
        ]
        if teller == "health":
            await service.set_serving(True)
        else:
            await service.wake_watchers()
        await asked_for_model(service)
        await service.set_serving(False)
        assert (await client.get("/props")).json()["error"]["message"] == "Loading model"
        assert not task.done()
        del service.refusals["GetModel"]
        await service.tell_tenure("third")
        await service.set_serving(True)
        assert (await task).json() == {"tokens": [100, 101]}
        await until_ready(client)


async def test_health_may_tell_of_a_change_before_the_model_does(
    service: FakeService, serve: Serve
):
    """The stream that tells of models may be the later one: the service is asked, not guessed."""
    service.tenures = []
    async with serve() as client:
        service.tenures.append(model_pb2.WatchModelResponse(model_id="old", changing=True))
        await service.set_serving(False)
        await until_changing(client)
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/props")).json()["error"]["message"] == "Loading model"
        task = asyncio.create_task(client.post("/tokenize", json={"content": "ab"}))
        await service.tell_tenure("next")
        await service.set_serving(True)
        assert (await task).json() == {"tokens": [100, 101]}
        await until_ready(client)

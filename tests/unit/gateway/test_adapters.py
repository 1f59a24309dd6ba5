"""Adapters over HTTP: the peer's bodies, and its leniency told in a header."""

from __future__ import annotations

import logging

import httpx
import pytest
from kvarts.v1 import common_pb2, lora_pb2

from tests.unit.gateway.fake_service import FakeService

IGNORED = "x-kvarts-ignored"


@pytest.fixture(name="loaded")
def load(service: FakeService) -> FakeService:
    service.adapters = [lora_pb2.Adapter(id=0, path="a.gguf", scale=1.0), lora_pb2.Adapter(id=3)]
    return service


def sent(service: FakeService) -> common_pb2.AdapterScales:
    return service.calls[-1].request.adapters


async def test_scales_are_replaced(client: httpx.AsyncClient, loaded: FakeService) -> None:
    body = [{"id": 0, "scale": 0.5}, {"id": 0, "scale": 0.25}, {"id": 3}, 7, {"scale": 1}]
    response = await client.post("/lora-adapters", json=body)
    assert response.json() == {"success": True}
    assert IGNORED not in response.headers
    assert [(one.adapter_id, one.scale) for one in loaded.scales[-1].scales.scales] == [
        (0, 0.25),
        (3, 0.0),
    ]


async def test_an_id_that_is_not_loaded_is_ignored_and_told(
    client: httpx.AsyncClient, loaded: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gateway"):
        response = await client.post("/lora-adapters", json=[{"id": 9, "scale": 1}])
    assert response.json() == {"success": True}
    assert response.headers[IGNORED] == "adapters that are not loaded: 9"
    assert "9" in caplog.text
    assert loaded.scales[-1].HasField("scales")
    assert not loaded.scales[-1].scales.scales


@pytest.mark.parametrize("body", [{}, {"lora": []}])
async def test_no_set_is_the_servers(
    client: httpx.AsyncClient, loaded: FakeService, body: dict[str, object]
) -> None:
    response = await client.post("/completion", json={"prompt": "a", **body})
    assert response.status_code == 200
    assert not loaded.calls[-1].request.HasField("adapters")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_set_keeps_what_is_loaded_of_it(
    client: httpx.AsyncClient, loaded: FakeService, *, stream: bool
) -> None:
    lora = [{"id": 3, "scale": 2}, {"id": 8, "scale": 1}]
    body = {"prompt": "a", "lora": lora, "stream": stream}
    response = await client.post("/completion", json=body)
    assert response.headers[IGNORED] == "adapters that are not loaded: 8"
    assert [(one.adapter_id, one.scale) for one in sent(loaded).scales] == [(3, 2.0)]


async def test_a_set_of_unknown_ids_turns_all_off(
    client: httpx.AsyncClient, loaded: FakeService
) -> None:
    body = {"prompt": "a", "lora": [{"id": i, "scale": 1} for i in range(10, 40)]}
    response = await client.post("/completion", json=body)
    assert response.headers[IGNORED].endswith("25, 14 more")
    assert loaded.calls[-1].request.HasField("adapters")
    assert not sent(loaded).scales


async def test_chat_takes_a_set_too(client: httpx.AsyncClient, loaded: FakeService) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "lora": [{"id": 0, "scale": 1}]}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert [(one.adapter_id, one.scale) for one in sent(loaded).scales] == [(0, 1.0)]


@pytest.mark.parametrize("body", [[{}], [7], [{"id": "0", "scale": 1}], [[{"id": 0}]]])
async def test_a_list_that_names_no_adapter_turns_all_off(
    client: httpx.AsyncClient, loaded: FakeService, body: list[object]
) -> None:
    response = await client.post("/lora-adapters", json=body)
    assert response.headers[IGNORED] == "adapters that are not loaded: -1"
    assert not loaded.scales[-1].scales.scales
    response = await client.post("/completion", json={"prompt": "a", "lora": body})
    assert response.headers[IGNORED] == "adapters that are not loaded: -1"
    assert sent(loaded).scales == []
    assert loaded.calls[-1].request.HasField("adapters")


async def test_an_adapter_that_is_being_unloaded_is_none(
    client: httpx.AsyncClient, loaded: FakeService
) -> None:
    loaded.adapters[1].is_unloading = True
    lora = [{"id": 0, "scale": 2}, {"id": 3, "scale": 1}]
    response = await client.post("/completion", json={"prompt": "a", "lora": lora})
    assert response.headers[IGNORED] == "adapters that are not loaded: 3"
    assert [(one.adapter_id, one.scale) for one in sent(loaded).scales] == [(0, 2.0)]


async def test_the_number_of_entries_is_bounded(
    client: httpx.AsyncClient, loaded: FakeService
) -> None:
    entries = [{"id": 0, "scale": 1}] * 4097
    message = "has 4097 entries, at most 4096 are taken"
    for path, body in (
        ("/lora-adapters", entries),
        ("/completion", {"prompt": "a", "lora": entries}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    assert not loaded.scales
    assert not loaded.calls

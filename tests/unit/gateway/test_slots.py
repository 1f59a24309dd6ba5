from __future__ import annotations

import json

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from kvarts.v1 import generation_pb2, slot_pb2

from gateway.requests import wrap_slot_id
from gateway.schema import CompletionParams
from gateway.settings import short_settings
from gateway.slots import is_filename
from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService, failing


async def test_slots_never_used_have_no_parameters(client: httpx.AsyncClient):
    assert (await client.get("/slots")).json() == [
        {"id": index, "n_ctx": 256, "speculative": False, "is_processing": False}
        for index in range(2)
    ]


async def test_a_used_slot_shows_its_request(client: httpx.AsyncClient, service: FakeService):
    await client.post("/completion", json={"prompt": "a", "seed": 5, "timings_per_token": True})
    service.slots[1] = slot_pb2.Slot(
        id=1,
        state=slot_pb2.SLOT_STATE_IDLE,
        context_tokens=256,
        held_tokens=13,
        task_id=4,
        annotation=service.calls[0].request.annotation,
    )
    slot = (await client.get("/slots")).json()[1]
    assert list(slot) == [
        "id",
        "n_ctx",
        "speculative",
        "is_processing",
        "id_task",
        "n_prompt_tokens",
        "n_prompt_tokens_processed",
        "n_prompt_tokens_cache",
        "params",
        "next_token",
    ]
    assert (slot["id_task"], slot["n_prompt_tokens"]) == (4, 13)
    assert slot["next_token"] == [
        {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}
    ]
    assert list(slot["params"]) == list(short_settings(CompletionParams()))
    assert (slot["params"]["seed"], slot["params"]["timings_per_token"]) == (5, True)


@pytest.mark.parametrize("annotation", ["", "not json", "[1]", '{"seed": 1}', "\ud83d\ude00"])
async def test_requests_of_others_show_what_the_service_knows(
    client: httpx.AsyncClient, service: FakeService, annotation: str
):
    sampling = generation_pb2.SamplingParams(temperature=0.5, top_k=7)
    service.slots[0] = slot_pb2.Slot(
        id=0,
        state=slot_pb2.SLOT_STATE_DECODE,
        task_id=0,
        evaluated_tokens=3,
        cached_tokens=2,
        decoded_tokens=9,
        remaining_tokens=4,
        has_new_line=True,
        annotation=annotation.encode("utf-16", "surrogatepass").decode("utf-16"),
        settings=generation_pb2.GenerationSettings(
            sampling=sampling, max_tokens=13, time_limit=Duration(seconds=1)
        ),
    )
    slot = (await client.get("/slots")).json()[0]
    assert slot["is_processing"] is True
    assert (slot["n_prompt_tokens_processed"], slot["n_prompt_tokens_cache"]) == (3, 2)
    assert (slot["params"]["top_k"], slot["params"]["n_predict"]) == (7, 13)
    assert slot["next_token"] == [
        {"has_next_token": True, "has_new_line": True, "n_remain": 4, "n_decoded": 9}
    ]


async def test_no_idle_slot(client: httpx.AsyncClient, service: FakeService):
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
    for slot in service.slots:
        slot.state = slot_pb2.SLOT_STATE_PREFILL
    assert (await client.get("/slots?fail_on_no_slot=")).status_code == 200
    response = await client.get("/slots?fail_on_no_slot=0")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no slot available"


async def test_slots_can_be_off(serve: Serve):
    async with serve(has_slots=False) as client:
        response = await client.get("/slots")
        assert response.status_code == 501
        assert "--slots" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "shown", "erased"), [("1", 1, 1), ("3", 3, 1), ("-1", -1, 1), (" 4x", 4, 0)]
)
async def test_erase_wraps_the_id_and_shows_it_as_asked(
    client: httpx.AsyncClient, service: FakeService, asked: str, shown: int, erased: int
):
    response = await client.post(f"/slots/{asked}?action=erase")
    assert response.json() == {"id_slot": shown, "n_erased": 17}
    assert service.erased == [erased]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/slots/x?action=erase", {}, 400, "Invalid slot ID"),
        ("/slots/9999999999?action=erase", {}, 400, "Invalid slot ID"),
        ("/slots/0?action=copy", {}, 400, "Invalid action"),
        ("/slots/0", {}, 400, "Invalid action"),
        ("/slots/0?action=save", {}, 500, "key 'filename' not found"),
        ("/slots/0?action=save", {"filename": 5}, 500, "type must be string, but is number"),
        ("/slots/0?action=restore", {"filename": "../a"}, 400, "Invalid filename"),
    ],
)
async def test_bad_actions(
    client: httpx.AsyncClient, path: str, body: object, status: int, message: str
):
    response = await client.post(path, content=json.dumps(body))
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


async def test_save(client: httpx.AsyncClient, service: FakeService):
    response = await client.post("/slots/4?action=save", json={"filename": "a.bin"})
    assert response.json() == {
        "id_slot": 4,
        "filename": "a.bin",
        "n_saved": 21,
        "n_written": 4096,
        "timings": {"save_ms": 1.5},
    }
    assert service.saved == [slot_pb2.SaveSlotRequest(slot_id=0, filename="a.bin")]


@pytest.mark.parametrize("value", ["Hi", [5, 6], ["a", 7], {"prompt_string": "Hi"}])
async def test_save_of_a_prompt(client: httpx.AsyncClient, service: FakeService, value: object):
    body = {"filename": "a.bin", "prompt": value}
    response = await client.post("/slots/1?action=save", json=body)
    assert response.json()["timings"] == {
        "save_ms": 1.5,
        "cache_n": 4,
        "prompt_n": 17,
        "prompt_ms": 250.0,
    }
    (request,) = service.saved
    if value == "Hi":
        assert request.text == "Hi"
    if value == [5, 6]:
        assert list(request.tokens.ids) == [5, 6]
    assert request.WhichOneof("prompt") is not None


@pytest.mark.parametrize("value", [[], ["a", "b"], [[1], [2]], 5, None, [1 << 30], [-1], {}])
async def test_save_of_what_is_no_prompt(
    client: httpx.AsyncClient, service: FakeService, value: object
):
    body = {"filename": "a.bin", "prompt": value}
    response = await client.post("/slots/1?action=save", json=body)
    assert response.status_code == 400
    assert service.saved == []


async def test_restore(client: httpx.AsyncClient):
    response = await client.post("/slots/1?action=restore", json={"filename": "a.bin"})
    assert response.json() == {
        "id_slot": 1,
        "filename": "a.bin",
        "n_restored": 21,
        "n_read": 4096,
        "timings": {"restore_ms": 2.5},
    }


@pytest.mark.parametrize(
    ("reason", "status", "message"),
    [
        ("SLOT_FILE_NOT_FOUND", 400, "Unable to restore slot: why"),
        ("SLOT_FILE_MISMATCH", 400, "Unable to restore slot: why"),
        ("SLOT_FILE_CORRUPT", 400, "Unable to restore slot: why"),
        ("SLOT_CONTEXT_TOO_SMALL", 400, "Unable to restore slot: why"),
        ("KV_PAGES_EXHAUSTED", 400, "Unable to restore slot: No available space in KV cache"),
        ("SLOT_BUSY", 409, "why"),
        ("IDENTITY_PENDING", 503, "why"),
        ("SLOT_IO", 500, "why"),
    ],
)
async def test_a_refused_restore_has_the_peers_words_and_our_cause(
    client: httpx.AsyncClient, service: FakeService, reason: str, status: int, message: str
):
    service.refusals["RestoreSlot"] = failing(grpc.StatusCode.DATA_LOSS, reason, "why")
    response = await client.post("/slots/1?action=restore", json={"filename": "a.bin"})
    assert response.status_code == status
    assert response.headers["x-kvarts-reason"] == reason
    assert response.json()["error"]["message"] == message


async def test_actions_need_a_directory(serve: Serve, service: FakeService):
    service.info.features.slot_files = False
    async with serve() as client:
        response = await client.post("/slots/x?action=erase")
        assert response.status_code == 501
        assert "--slot-save-path" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["a", "one.bin", "A-b_c.9", "-", "a" * 255])
def test_filenames(name: str):
    assert is_filename(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 256,
        "é",
        "a b",
        "w\u202dx",
        ".hidden",
        "../up.bin",
        "a..b",
        "a/b",
        "a\\b",
        "a:b",
        "a*",
        "a?",
        'a"',
        "<a",
        "a>",
        "a|b",
        "nul\0x",
        "a\nb",
        "a\x7f",
        "a\x85",
        "end.",
        " lead",
        "trail ",
        "a\uff0eb",
        "a\u2215b",
        "a\u2216b",
        "a\ufffd",
        "\ufeffa",
    ],
)
def test_bad_filenames(name: str):
    assert not is_filename(name)


def test_ids_wrap_as_unsigned_numbers_of_64_bits():
    assert [wrap_slot_id(slot_id, 3) for slot_id in (0, 4, -1, -2)] == [0, 1, 0, 2]

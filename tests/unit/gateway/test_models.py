"""POST /admin/models/load over a scripted ModelService, and what is known of a model that follows."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
import httpx
import pytest
from kvarts.v1 import model_pb2

from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService, failing
from tests.waiting import until

PATH = "/admin/models/load"


def script(service: FakeService) -> None:
    """A load with a step on its way, after which another model is served."""
    service.model = model_pb2.Model(id="next", path="models/next.gguf", architecture="llama")
    loaded = model_pb2.LoadedModel(
        model=service.model,
        plan=model_pb2.LoadPlan(needed_bytes=7, available_bytes=9, side_by_side=True),
        calls_on_old_model=2,
    )
    loaded.elapsed.nanos = 1_500_000
    service.loading = [
        model_pb2.LoadModelResponse(
            progress=model_pb2.LoadProgress(stage=model_pb2.LOAD_STAGE_WEIGHTS)
        ),
        model_pb2.LoadModelResponse(loaded=loaded),
    ]


async def test_a_model_is_loaded_and_known_at_once(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    script(service)
    body = {"path": "next.gguf", "replace_first": True, "drain_timeout": 1.5}
    told = await client.post(PATH, json=body)
    (asked,) = service.loads
    assert (asked.path, asked.replace_first, asked.validate_only) == ("next.gguf", True, False)
    assert asked.drain_timeout.ToMilliseconds() == 1500
    assert told.json() == {
        "model": {"id": "next", "path": "models/next.gguf", "architecture": "llama"},
        "plan": {"needed_bytes": 7, "available_bytes": 9, "side_by_side": True},
        "elapsed_ms": 1.5,
        "unavailable_ms": 0,
        "calls_on_old_model": 2,
    }
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "next"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"model": "a"}, "model"),
        ({"path": 1}, '"path" must be a string, got 1'),
        ({"path": "a", "validate_only": 1}, '"validate_only" must be a boolean'),
        ({"path": "a", "replace_first": "no"}, '"replace_first" must be a boolean'),
        ({"path": "a", "drain_timeout": "1"}, '"drain_timeout" must be a number of seconds'),
        ({"path": "a", "drain_timeout": -1}, '"drain_timeout" must be in'),
    ],
)
async def test_a_wrong_body_is_refused_by_its_key(
    client: httpx.AsyncClient, service: FakeService, body: dict[str, Any], told: str
) -> None:
    response = await client.post(PATH, json=body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
    assert service.loads == []


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_ONLY", 403),
        (grpc.StatusCode.NOT_FOUND, "MODEL_FILE_NOT_FOUND", 400),
        (grpc.StatusCode.INVALID_ARGUMENT, "MODEL_FILE_INVALID", 400),
        (grpc.StatusCode.UNIMPLEMENTED, "MODEL_NOT_SUPPORTED", 501),
        (grpc.StatusCode.ABORTED, "MODEL_SWAP_BUSY", 409),
        (grpc.StatusCode.ABORTED, "MODEL_IN_USE", 409),
        (grpc.StatusCode.OUT_OF_RANGE, "MODEL_TOO_LARGE", 400),
        (grpc.StatusCode.INTERNAL, "MODEL_ROLLED_BACK", 500),
        (grpc.StatusCode.INTERNAL, "MODEL_LOST", 500),
    ],
)
async def test_a_refusal_names_its_reason(
    client: httpx.AsyncClient,
    service: FakeService,
    code: grpc.StatusCode,
    reason: str,
    status: int,
) -> None:
    service.refusals["LoadModel"] = failing(code, reason, "the words")
    response = await client.post(PATH, json={"path": "a.gguf"})
    assert (response.status_code, response.headers["x-kvarts-reason"]) == (status, reason)
    assert response.json()["error"]["message"] == "the words"


async def test_a_model_that_somebody_else_loaded_is_known(
    service: FakeService, serve: Serve
) -> None:
    service.tenures = []
    async with serve() as client:
        service.model = model_pb2.Model(id="next")
        await service.tell_tenure("next")
        read = partial(client.get, "/v1/models")
        await until(read, lambda reply: reply.json()["data"][0]["id"] == "next")

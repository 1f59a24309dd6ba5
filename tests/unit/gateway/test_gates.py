from __future__ import annotations

import httpx
import pytest

from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService

UNAUTHORISED = {
    "error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
}
NOT_FOUND = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}


async def test_keys(serve: Serve, service: FakeService):
    async with serve(api_keys=("sesame", "second")) as client:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "bearer sesame"}):
            for path in ("/props", "/models", "/metrics", "/no/such"):
                response = await client.get(path, headers=headers)
                assert (response.status_code, response.json()) == (401, UNAUTHORISED)
        wrong_first = {"Authorization": "Bearer no", "X-Api-Key": "sesame"}
        assert (await client.get("/props", headers=wrong_first)).status_code == 401
        for headers in (
            {"Authorization": "Bearer sesame"},
            {"Authorization": "second"},
            {"X-Api-Key": "sesame"},
        ):
            response = await client.post("/completion", json={"prompt": "a"}, headers=headers)
            assert response.status_code == 200
        for path in ("/health", "/v1/health", "/"):
            assert (await client.get(path)).status_code == 200
    assert [call.key for call in service.calls] == [
        "Bearer sesame",
        "Bearer second",
        "Bearer sesame",
    ]


@pytest.mark.parametrize("key", ["é", "a\tb", "\u201csk\u201d"])
async def test_a_key_that_no_call_can_carry_opens_what_needs_none(
    serve: Serve, service: FakeService, key: str
):
    headers = [(b"authorization", f"Bearer {key}".encode())]
    async with serve() as client:
        for path in ("/completion", "/tokenize"):
            body = {"prompt": "a", "content": "a"}
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
    assert [call.key for call in service.calls] == [""]


async def test_the_prefix_is_part_of_every_path(serve: Serve):
    async with serve(api_prefix="/llm") as client:
        assert (await client.get("/llm/v1/models")).status_code == 200
        assert (await client.get("/health")).json() == NOT_FOUND


async def test_with_a_prefix_even_health_needs_the_key(serve: Serve):
    async with serve(api_prefix="/llm", api_keys=("key",)) as client:
        assert (await client.get("/llm/health")).status_code == 401
        assert (await client.get("/llm/health", headers={"X-Api-Key": "key"})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nothing"),
        ("GET", "/completion"),
        ("DELETE", "/slots"),
        ("POST", "/models/load"),
        ("GET", "/health/"),
        ("PUT", "/props"),
    ],
)
async def test_unknown_paths_and_methods_are_not_told_apart(
    client: httpx.AsyncClient, method: str, path: str
):
    response = await client.request(method, path)
    assert (response.status_code, response.json()) == (404, NOT_FOUND)
    assert response.headers["server"] == "llama.cpp"


async def test_any_origin_is_echoed_and_an_absent_one_is_empty(client: httpx.AsyncClient):
    response = await client.get("/health", headers={"Origin": "http://web.example"})
    assert response.headers["access-control-allow-origin"] == "http://web.example"
    assert (await client.get("/health")).headers["access-control-allow-origin"] == ""


async def test_preflight_needs_neither_key_nor_service(serve: Serve, service: FakeService):
    await service.set_serving(False)
    async with serve(waits=False, api_keys=("key",), cors_credentials=False) as client:
        response = await client.options("/anything", headers={"Origin": "http://a"})
        assert (response.status_code, response.content) == (200, b"")
        headers = response.headers
        assert headers["access-control-allow-credentials"] == "false"
        assert headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
        assert headers["access-control-allow-headers"] == "*"
        assert headers["access-control-allow-origin"] == "*"
        assert headers["content-type"] == "text/html"


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost:5173", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:3000", True),
        ("http://localhost.evil.example", False),
        ("http://[", False),
        (None, False),
    ],
)
async def test_local_origins_only(serve: Serve, origin: str | None, *, is_allowed: bool):
    async with serve(cors_origins="localhost") as client:
        headers = {"Origin": origin} if origin else {}
        response = await client.get("/health", headers=headers)
        expected = origin if is_allowed else None
        assert response.headers.get("access-control-allow-origin") == expected


async def test_a_fixed_origin(serve: Serve):
    async with serve(cors_origins="http://web.example") as client:
        response = await client.get("/health", headers={"Origin": "http://other"})
        assert response.headers["access-control-allow-origin"] == "http://web.example"

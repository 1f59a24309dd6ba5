"""Every field with every kind of bad value, and every route with every kind of key.

Both lists are read from the gateway's own tables, so that a new row is met here too.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from gateway.routes import route_table
from gateway.schema import FIELDS
from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService

# As JSON text, because some have no Python value that encodes to them.
HOSTILE = (
    "-1",
    "0",
    "2147483648",
    "-2147483649",
    "9007199254740993",
    "9223372036854775808",
    "1" + "0" * 400,
    "1e400",
    "-1e400",
    "NaN",
    "true",
    "null",
    '""',
    '"text"',
    "[]",
    '[null, {"a": [1e400]}]',
    "{}",
    '{"id": 9223372036854775808}',
    '"\\ud800"',
)
PUBLIC = {"/health", "/v1/health", "/"}
NAMES = sorted({name for field in FIELDS for name in field.names or (field.parameter,)})


@pytest.mark.parametrize("name", NAMES)
async def test_no_value_of_a_field_is_more_than_an_error(
    client: httpx.AsyncClient, name: str
) -> None:
    bodies = [f'{{"prompt": "a", "n_predict": 1, "{name}": {value}}}' for value in HOSTILE]
    replies = await asyncio.gather(*(client.post("/completion", content=b) for b in bodies))
    for value, reply in zip(HOSTILE, replies, strict=True):
        said = (name, value, reply.status_code, reply.text[:200])
        # 500 is the peer's word for a body that is no JSON (NaN, a lone surrogate).
        assert reply.status_code in (200, 400, 500, 501), said
        if reply.status_code == 500:
            assert "parse error" in reply.text, said
        if reply.status_code != 200 and not reply.headers["content-type"].startswith("text/event"):
            error = json.loads(reply.content)["error"]
            assert error["message"], said
            assert error["code"] == reply.status_code, said
    assert (await client.get("/health")).status_code == 200


def _disguises(path: str) -> list[str]:
    first, rest = path[1:2], path[2:]
    return [
        path,
        f"/{path}",
        f"{path}/",
        f"/%{ord(first):02x}{rest}" if first else "/%2e",
        path.upper(),
        f"/.{path}",
        f"/x/..{path}",
        f"{path}?key=sesame",
        f"{path};key",
        f"{path}%00",
    ]


async def test_only_the_public_paths_open_without_a_key(serve: Serve, service: FakeService) -> None:
    rows = [(method, path) for method, paths, _ in route_table() for path in paths]
    assert len(rows) > 30
    wrong: tuple[dict[str, str], ...] = (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer sesam"},
        {"Authorization": "Bearer sesame2"},
        {"Authorization": "Basic sesame"},
        {"X-Api-Key": "SESAME"},
        {"X-Api-Key": ""},
    )
    async with serve(api_keys=("sesame",)) as client:
        for method, path in rows:
            if path in PUBLIC:
                continue
            # Sent as written: a client would resolve the dots itself.
            tries = [
                (verb, client.base_url.copy_with(raw_path=disguise.encode()), wrong[0])
                for disguise in _disguises(path)
                for verb in (method, "HEAD")
            ]
            tries += [(method, client.base_url.join(path), headers) for headers in wrong]
            replies = await asyncio.gather(
                *(client.request(v, url, headers=h, content="{}") for v, url, h in tries)
            )
            for tried, reply in zip(tries, replies, strict=True):
                assert reply.status_code == 401, (tried, reply.status_code)
    assert not service.calls

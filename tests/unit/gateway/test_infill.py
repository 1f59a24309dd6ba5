"""POST /infill: the layout of the prompt, worked out by hand, over a byte tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.infill import Layout
from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService
from tests.unit.gateway.scripts import BOS, encode

PRE, SUF, MID, REP, SEP = 5, 6, 7, 8, 9
HALVES = {"input_prefix": "ab", "input_suffix": "cd"}
SNIPPET = encode("\n\n--- snippet ---\n\n")


@pytest.fixture
def service(service: FakeService) -> FakeService:
    tokens = service.model.special_tokens
    tokens.fim_pre.id, tokens.fim_suf.id, tokens.fim_mid.id = PRE, SUF, MID
    return service


async def _prompt(client: httpx.AsyncClient, service: FakeService, **body: Any) -> list[int]:
    response = await client.post("/infill", json={**HALVES, **body, "n_predict": 1})
    assert response.status_code == 200, response.text
    return list(service.calls[-1].request.tokens.ids)


async def test_the_gap_is_between_prefix_and_suffix(serve: Serve, service: FakeService):
    async with serve(batch_tokens=64) as client:
        bos = [BOS] if service.model.add_bos else []
        assert await _prompt(client, service) == [
            *bos, PRE, *encode("ab"), SUF, *encode("cd"), MID,
        ]  # fmt: skip
        assert await _prompt(client, service, prompt="xy") == [
            *bos, PRE, *encode("abxy"), SUF, *encode("cd"), MID,
        ]  # fmt: skip
        # The peer ignores a prompt that is no text.
        assert await _prompt(client, service, prompt=5) == await _prompt(client, service)


async def test_ids_and_texts_mix_in_a_half(serve: Serve, service: FakeService):
    async with serve(batch_tokens=64) as client:
        prompt = await _prompt(client, service, input_prefix=["a", 42, "b"])
        assert [*encode("a"), 42, *encode("b")] == prompt[prompt.index(PRE) + 1 : -4]


async def test_the_suffix_comes_first_where_the_flag_says_so(serve: Serve, service: FakeService):
    async with serve(batch_tokens=64, spm_infill=True) as client:
        prompt = await _prompt(client, service)
        assert prompt[-7:] == [SUF, *encode("cd"), PRE, *encode("ab"), MID]


async def test_halves_share_the_batch_three_to_one(serve: Serve, service: FakeService):
    async with serve(batch_tokens=16) as client:
        prompt = await _prompt(
            client, service, input_prefix="0123456789abcdef", input_suffix="uvwxyz", prompt="!"
        )
        start = prompt.index(PRE)
        # 3 * (16 // 4) of the prefix's end; 16 // 4 - (2 + 1) of the suffix's beginning.
        assert prompt[start:] == [PRE, *encode("456789abcdef!"), SUF, *encode("u"), MID]


async def test_extra_chunks_stand_before_bos(serve: Serve, service: FakeService):
    extra = [{"text": "one", "filename": "a.txt"}, {"text": "two"}]
    async with serve(batch_tokens=64) as client:
        plain = await _prompt(client, service)
        marked = await _prompt(client, service, input_extra=extra)
        assert marked == [*SNIPPET, *encode("one"), *SNIPPET, *encode("two"), *plain]


async def test_extra_chunks_name_their_files_where_the_vocabulary_can(
    serve: Serve, service: FakeService
):
    service.model.special_tokens.fim_rep.id = REP
    service.model.special_tokens.fim_sep.id = SEP
    extra = [{"text": "one", "filename": "a.txt"}, {"text": "two"}]
    async with serve(batch_tokens=64) as client:
        prompt = await _prompt(client, service, input_extra=extra)
        head = [
            REP, *encode("myproject\n"),
            SEP, *encode("a.txt\none"),
            SEP, *encode("tmp\ntwo"),
            SEP, *encode("filename\n"),
        ]  # fmt: skip
        assert prompt[: len(head)] == head


@pytest.mark.parametrize(
    ("batch", "context", "max_tokens", "kept"),
    [(128, 512, 32, 320), (128, 512, -1, 386), (2048, 512, 32, 0)],
)
def test_extra_chunks_get_what_the_context_has_left(
    batch: int, context: int, max_tokens: int, kept: int
):
    layout = Layout(batch, context, max_tokens, swaps_halves=False)
    assert layout.extra_tokens == kept


BAD = [
    ({"input_extra": "x"}, 400, "must be an array of"),
    ({"input_extra": [5]}, 400, '"text" field with a string value'),
    ({"input_extra": [{"text": 5}]}, 400, '"text" field with a string value'),
    ({"input_extra": [{"text": "a", "filename": 5}]}, 400, '"filename" field must be a string'),
    ({"input_extra": [{"text": ""}] * 1025}, 400, "1025 chunks, the limit is 1024"),
    ({"input_prefix": [-1]}, 400, "invalid tokens"),
    ({"input_suffix": 5}, 500, "type must be string, but is number"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD)
async def test_bad_bodies(
    serve: Serve, service: FakeService, body: dict[str, Any], status: int, message: str
):
    async with serve() as client:
        response = await client.post("/infill", json={**HALVES, **body})
        assert response.status_code == status
        assert message in response.json()["error"]["message"]
        assert not service.calls


@pytest.mark.parametrize("name", ["input_prefix", "input_suffix"])
async def test_a_missing_half_is_named(serve: Serve, name: str):
    async with serve() as client:
        response = await client.post("/infill", json={k: HALVES[k] for k in HALVES if k != name})
        assert response.status_code == 500
        assert f"key '{name}' not found" in response.json()["error"]["message"]

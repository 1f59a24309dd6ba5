"""Token ids of one model never reach another, whatever changes between making and running them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.engine import Engine
from gateway import prompts
from service.loaded import LoadedModel
from service.model_loader import ModelOrder
from tests.contract.serving import FACTS, StepGate, gated_runner
from tests.contract.swaps import NEW, OLD, A, B, LoadModelRequest, all_replies, swapping
from tests.fake_runner import FakeRunner
from tests.fake_text import FakeTokenizer
from tests.loaders import FakeLoader
from tests.unit.gateway.conftest import serving

CHAT = {"messages": [{"role": "user", "content": "ab"}], "verbose": True}
# What a route is asked, and which members of its answer tell what the model was given.
ROUTES = [
    ("/completion", {"prompt": "ab"}, ("prompt", "content")),
    ("/completion", {"prompt": ["ab", 5]}, ("prompt", "content")),
    ("/infill", {"input_prefix": "ab", "input_suffix": "cd"}, ("prompt", "content")),
    ("/v1/completions", {"prompt": "ab", "logit_bias": [["b", 1.5]], "verbose": True}, None),
    ("/v1/chat/completions", CHAT | {"logit_bias": [["b", 1.5]]}, None),
]


class OtherTokenizer(FakeTokenizer):
    """Every letter has the id of the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        head, text, tail = self._pieces[:2], self._pieces[2:-3], self._pieces[-3:]
        self._pieces = [*head, *text[1:], text[0], *tail]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces)}


def facts(first: int) -> dict[str, Any]:
    gap = {name: (first + i, name) for i, name in enumerate(("fim_pre", "fim_suf", "fim_mid"))}
    return {"facts": replace(FACTS, special_tokens={**FACTS.special_tokens, **gap})}


class OtherLoader(FakeLoader):
    """Its models have another vocabulary than the first one."""

    def describe(self, order: ModelOrder, engine: Engine, device: FakeRunner) -> LoadedModel:
        model = super().describe(order, engine, device)
        return replace(model, tokenizer=OtherTokenizer(), vocabulary="new", **facts(20))


@pytest.fixture(name="loader")
def _loader(tmp_path: Path) -> FakeLoader:
    loader = OtherLoader(tmp_path)
    loader.write(OLD, A)
    loader.write(NEW, B)
    return loader


class Hold:
    """Keeps the first prompt that was tokenised back until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_tokens = asyncio.Event()
        self.goes_on = asyncio.Event()
        tokenize = prompts.tokenize

        async def held(*args: Any, **how: Any) -> tuple[int, ...]:
            tokens = await tokenize(*args, **how)
            self.has_tokens.set()
            await self.goes_on.wait()
            return tokens

        monkeypatch.setattr(prompts, "tokenize", held)


def told(reply: httpx.Response, members: tuple[str, ...] | None) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    if members is None:
        shown = answer["__verbose"]
        assert shown["generation_settings"]["logit_bias"]
        return {name: shown[name] for name in ("prompt", "content", "generation_settings")}
    return {name: answer[name] for name in members}


@pytest.mark.parametrize("replaces_first", [False, True])
@pytest.mark.parametrize(("path", "body", "members"), ROUTES)
async def test_a_request_that_was_tokenised_before_a_change_is_made_anew(
    loader: FakeLoader,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    members: tuple[str, ...] | None,
    replaces_first: bool,
) -> None:
    hold = Hold(monkeypatch)
    asked = body | {"n_predict": 4, "temperature": 0, "seed": 7, "cache_prompt": False}
    open_gate = StepGate()
    open_gate.open()
    async with (
        asyncio.timeout(60),
        swapping(
            loader, model={"vocabulary": "old", **facts(10)}, runner=gated_runner(open_gate)
        ) as it,
        serving(f"127.0.0.1:{it.server.port}") as http,
    ):
        early = asyncio.create_task(http.post(path, json=asked))
        await hold.has_tokens.wait()
        await all_replies(it, LoadModelRequest(path=NEW, replace_first=replaces_first))
        hold.goes_on.set()
        late = told(await http.post(path, json=asked), members)
        assert told(await early, members) == late


async def test_a_stream_is_made_anew_before_its_first_event(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold(monkeypatch)
    asked = {"prompt": "ab", "n_predict": 4, "temperature": 0, "stream": True}
    async with (
        asyncio.timeout(60),
        swapping(loader, model={"vocabulary": "old"}) as it,
        serving(f"127.0.0.1:{it.server.port}") as http,
    ):
        early = asyncio.create_task(http.post("/completion", json=asked))
        await hold.has_tokens.wait()
        await all_replies(it, LoadModelRequest(path=NEW))
        hold.goes_on.set()
        text = (await early).text
        assert '"prompt":"<s>ab"' in text
        assert "error" not in text

"""Grammars and schemas over the wire: what is refused, and with which words."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kvarts.v1 import common_pb2, generation_pb2, tokenization_pb2

from engine.text.grammar.matcher import GrammarCompiler
from service.defaults import GenerationDefaults
from tests.contract.serving import GenerateRequest, failure, serving

Trigger = generation_pb2.GrammarTrigger


@pytest.mark.parametrize(
    ("request_", "metadata"),
    [
        (
            GenerateRequest(text="x", grammar='root ::= "a"\n!'),
            {"line": "2", "detail": "expected a name at '!'"},
        ),
        (
            GenerateRequest(text="x", json_schema='{"type":"strange"}'),
            {"path": "#", "detail": "unrecognized type strange"},
        ),
        (
            GenerateRequest(text="x", json_schema='{"properties":{"a":{"not":{}}}}'),
            {"path": "#/properties/a", "detail": "not cannot be honoured"},
        ),
    ],
)
async def test_what_cannot_be_compiled_names_line_or_path(
    request_: GenerateRequest, metadata: dict[str, str]
) -> None:
    async with serving() as it:
        failed = await failure(it.collect(request_))
    assert failed.reason == "BAD_GRAMMAR"
    assert failed.metadata == metadata


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(text="x", json_schema="{"), "json_schema"),
        (GenerateRequest(text="x", json_schema="[" * 5000), "json_schema"),
        (
            GenerateRequest(
                text="x",
                grammar='root ::= "a"',
                grammar_lazy=True,
                grammar_triggers=[Trigger(pattern="(")],
            ),
            "grammar_triggers[0].pattern",
        ),
        (
            GenerateRequest(
                text="x",
                grammar='root ::= "a"',
                grammar_lazy=True,
                grammar_triggers=[Trigger(word="a b"), Trigger(word="a")],
            ),
            "grammar_triggers[1].word",
        ),
        (
            GenerateRequest(text="x", grammar_lazy=True, grammar_triggers=[Trigger(word="a")]),
            "grammar_lazy",
        ),
        (GenerateRequest(text="x", grammar='root ::= "a"', grammar_lazy=True), "grammar_triggers"),
    ],
)
async def test_what_is_malformed_names_the_field(request_: GenerateRequest, field: str) -> None:
    async with serving() as it:
        failed = await failure(it.collect(request_))
    assert failed.reason == "INVALID_FIELD"
    assert failed.metadata["field"] == field


async def test_grammars_are_compiled_where_they_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling: list[str] = []
    compile_text = GrammarCompiler.compile

    def watched(self: GrammarCompiler, text: str, **shown: Any) -> Any:
        compiling.append(threading.current_thread().name)
        return compile_text(self, text, **shown)

    monkeypatch.setattr(GrammarCompiler, "compile", watched)
    async with serving() as it:
        await it.collect(GenerateRequest(text="x", grammar='root ::= "a"', max_tokens=1))
        await it.collect(GenerateRequest(text="x", json_schema="{}", max_tokens=1))
        await it.collect(chat_request(json_schema="{}"))
    assert len(compiling) == 3
    # Neither the loop that answers calls, nor the thread that runs steps.
    assert not {threading.main_thread().name, "engine"} & set(compiling)


async def test_a_trigger_token_must_exist() -> None:
    request = GenerateRequest(
        text="x",
        grammar='root ::= "a"',
        grammar_lazy=True,
        grammar_triggers=[Trigger(token_id=100_000)],
    )
    async with serving() as it:
        failed = await failure(it.collect(request))
    assert failed.reason == "TOKEN_NOT_IN_VOCAB"


async def test_the_grammar_of_the_server_is_refused_like_one_of_a_request() -> None:
    defaults = GenerationDefaults(grammar="root ::= missing")
    async with serving(model={"defaults": defaults}) as it:
        failed = await failure(it.collect(GenerateRequest(text="x")))
        assert failed.reason == "BAD_GRAMMAR"
        # An empty grammar is none.
        await it.collect(GenerateRequest(text="x", grammar="", max_tokens=1))


async def test_a_schema_is_converted_and_what_is_not_honoured_is_told() -> None:
    schema = '{"type":"array","items":{"type":"null"},"uniqueItems":true}'
    async with serving() as it:
        converted = await it.tokenization.ConvertJsonSchema(
            tokenization_pb2.ConvertJsonSchemaRequest(json_schema=schema)
        )
    assert 'null ::= "null"' in converted.grammar
    assert list(converted.ignored) == ["uniqueItems at #"]


STRICT = '{"properties":{"a":{"not":{}}}}'


def chat_request(**changes: Any) -> GenerateRequest:
    message = common_pb2.ChatMessage(role="user", content="x")
    return GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]), max_tokens=1, **changes)


@pytest.mark.parametrize("parses_chat", [True, False])
async def test_a_schema_holds_without_parsing(parses_chat: bool) -> None:
    defaults = GenerationDefaults(parses_chat=parses_chat)
    async with serving(model={"defaults": defaults}) as it:
        failed = await failure(it.collect(chat_request(json_schema=STRICT)))
        assert failed.reason == "BAD_GRAMMAR"
        assert failed.metadata["path"] == "#/properties/a"
        await it.collect(chat_request(json_schema=STRICT, lenient_schema=True))


Reasoning = generation_pb2.ReasoningParams


@pytest.mark.parametrize(
    ("reasoning", "field"),
    [
        (Reasoning(budget_tokens=0), "reasoning.budget_tokens"),
        (Reasoning(budget_tokens=5, start_tag="a"), "reasoning.budget_tokens"),
        (Reasoning(budget_tokens=-2), "reasoning.budget_tokens"),
        (Reasoning(end_tags=["x", ""]), "reasoning.end_tags[1]"),
        (Reasoning(end_tags=["x"] * 257), "reasoning.end_tags"),
        (Reasoning(start_tag="x" * 4097), "reasoning.start_tag"),
        (Reasoning(budget_message="x" * 4097), "reasoning.budget_message"),
    ],
)
async def test_a_limit_of_thinking_is_checked(reasoning: Reasoning, field: str) -> None:
    async with serving() as it:
        failed = await failure(it.collect(GenerateRequest(text="x", reasoning=reasoning)))
    assert failed.reason == "INVALID_FIELD"
    assert failed.metadata["field"] == field


async def test_a_model_that_does_not_think_has_no_limit_to_keep() -> None:
    async with serving() as it:
        await it.collect(chat_request(reasoning=Reasoning(budget_tokens=0)))

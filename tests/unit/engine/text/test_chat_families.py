"""Each family against what llama.cpp reads of it.

`recorded_messages.json` holds texts, and the messages that llama.cpp's own parsers make of them with
the templates of its tree. `recorded_marks.json` holds which of the marks of families those templates
contain.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.text.chat_families import FAMILIES, find_format
from engine.text.chat_format import ChatFormat, ReasoningTags
from engine.text.parameter_kinds import ParameterKinds
from tests.unit.engine.text.reading import BY_NAME, Message, cut, parse

_HERE = Path(__file__).parent


@cache
def recorded(name: str) -> list[Any]:
    return json.loads((_HERE / name).read_text())


def _parsed(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    content, reasoning, calls = message
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize(
    "family", sorted({row["family"] for row in recorded("recorded_messages.json")})
)
def test_what_the_peer_reads_of_a_family(family: str, size: int):
    for row in recorded("recorded_messages.json"):
        if row["family"] != family:
            continue
        chat_format = BY_NAME.get(family) or find_format("")
        if row["tags"]:
            chat_format = replace(chat_format, reasoning=_tags(chat_format, row["tags"]))
        told = parse(
            chat_format,
            *cut(row["text"], size),
            opening=row["opening"],
            parses_tools=bool(row["tools"]) and not row["shaped"],
            reads_reasoning=row["reads"],
            is_shaped=row["shaped"],
            kinds=ParameterKinds(row["tools"].items()),
        )
        content, reasoning, calls = row["message"]
        expected = (content, reasoning, [(name, arguments) for name, arguments in calls])
        assert _parsed(told) == _parsed(expected), row["text"]


def _tags(chat_format: ChatFormat, tags: list[str]) -> ReasoningTags:
    known = chat_format.reasoning or ReasoningTags(tags[0], tags[1])
    return replace(known, start_gap=tags[2], end_lead=tags[3], end_gap=tags[4])


@pytest.mark.parametrize("row", recorded("recorded_marks.json"), ids=lambda row: row[0])
def test_a_template_of_the_peers_tree_is_of_its_family(row: list[Any]):
    _, family, thinks, marks = row
    found = find_format("\n".join(marks))
    assert (found.name, found.reasoning is not None) == (family, thinks)


def test_names_are_told_apart():
    assert len(BY_NAME) == len(FAMILIES)


@pytest.mark.parametrize(
    ("template", "name", "thinks"),
    [
        ("{{ messages }}", "content", False),
        ('<tool_call>{"name": x, "arguments": y}</tool_call>', "hermes", False),
        ('<think></think><tool_call>"name" "arguments"</tool_call>', "hermes", True),
        ("{% if x %}</think>{% endif %}", "content", True),
        ('[TOOL_CALLS] "name" "arguments"', "mistral", False),
        ('<|start_header_id|> {"name": f, "parameters": p}', "llama-3", False),
        ("<tool_call>\\n<function=' + n + '>\\n<parameter=' + k", "qwen3-coder", False),
        ("<tool_call>' + n <arg_key> <arg_value> </think>", "glm-4", True),
        ("<role>ASSISTANT</role> <tool_call> <arg_key> <arg_value>", "ling-3", True),
    ],
)
def test_a_template_tells_its_family(template: str, name: str, thinks: bool):
    found = find_format(template)
    assert (found.name, found.reasoning is not None) == (name, thinks)


def test_thoughts_and_calls_of_solar_are_told_apart():
    text = (
        "<|think|>hm<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>f"
        '<|tool_call:args|>{"n": 7}<|tool_call:end|>'
    )
    told = parse(BY_NAME["solar-open"], *text, opening="<|begin|>assistant")
    assert told == ("", "hm", [("f", '{"n": 7}')])


def test_white_space_beside_the_tags_of_laguna_is_the_models():
    told = parse(BY_NAME["laguna"], *"hm\n</think>\n\nSo", opening="<think>")
    assert told == ("\n\nSo", "hm\n", [])


def test_thoughts_of_ling_that_are_not_told_apart_keep_their_tags():
    opening, text = "<think>", "hm</think>Well"
    told = parse(BY_NAME["ling-3"], *text, opening=opening, reads_reasoning=False)
    assert told == (opening + text, "", [])


def test_thoughts_of_rwkv_begin_where_its_prompt_ends():
    template = "{{- 'Assistant:' -}}{% if enable_thinking is true %}{{- ' <think>' }}{% endif %}"
    closed = "{% if enable_thinking is false %}{{- ' <think>\n</think>' }}{% endif %}"
    told = parse(find_format(template + closed), *"hm</think>Well", opening="<think>")
    assert told == ("Well", "hm", [])

"""Expected values: llama.cpp's `llm_chat_apply_template` and `llm_chat_detect_template`, recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.text.builtin_formats import BUILTIN_FORMATS, DOTS1
from engine.text.template_marks import detect_format
from engine.text.turn_format import Turn, TurnFormat

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "recorded_formats.json").read_text(encoding="utf-8")
)
DOTS1_SOURCE = "x<|endofuserprompt|>"


def format_of(name: str) -> TurnFormat:
    return DOTS1 if name == DOTS1_SOURCE else BUILTIN_FORMATS[name]


def test_every_name_of_llama_cpp_is_known_and_no_other() -> None:
    assert {*BUILTIN_FORMATS, DOTS1_SOURCE} == set(RECORDED["formats"])


@pytest.mark.parametrize("name", RECORDED["formats"])
def test_conversations_are_written_as_llama_cpp_writes_them(name: str) -> None:
    written = [
        format_of(name).write(
            [(role, text) for role, text in conversation["messages"]],
            add_generation_prompt=conversation["add_generation_prompt"],
        )
        for conversation in RECORDED["conversations"]
    ]
    assert written == RECORDED["formats"][name]


def test_templates_are_recognised_as_llama_cpp_recognises_them() -> None:
    for source, name in RECORDED["detected"]:
        expected = None if name is None else format_of(name)
        assert detect_format(source) == expected, source


@pytest.mark.parametrize("name", BUILTIN_FORMATS)
def test_a_name_stands_for_its_own_format(name: str) -> None:
    assert detect_format(name) is BUILTIN_FORMATS[name]


def test_role_and_content_end_at_a_nul() -> None:
    # llama.cpp hands both on as C's strings.
    text = BUILTIN_FORMATS["chatml"].write([("user\0x", "a\0b")], add_generation_prompt=False)
    assert text == "<|im_start|>user\na<|im_end|>\n"


def test_a_role_is_text_and_never_a_pattern() -> None:
    turn = Turn("{role}|{Role}|{ROLE}:")
    assert turn.write("{ROLE}é", "{role}") == "{ROLE}é|{ROLE}é|{ROLE}é:{role}"
    assert turn.write("straße", "") == "straße|Straße|STRAßE:"
    assert turn.write("", "x") == "||:x"

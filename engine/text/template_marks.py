"""Tells which built-in chat format a Jinja template writes, by texts that stand in its source.

Nothing is parsed. The rules, and the order in which they are tried, are llama.cpp's, so that the
same file is read the same way.

Source: llama.cpp `llm_chat_detect_template`.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.builtin_formats import BUILTIN_FORMATS, DOTS1
from engine.text.turn_format import TurnFormat

# (format's name, what the source must hold); the first rule that fits counts.
_Rules = Sequence[tuple[str, tuple[str, ...]]]

_CHATML_RULES: _Rules = (
    ("phi4", ("<|im_sep|>",)),
    ("smolvlm", ("<end_of_utterance>",)),
    ("chatml", ()),
)
_INST_RULES: _Rules = (
    ("mistral-v7", ("[SYSTEM_PROMPT]",)),
    ("mistral-v1", ("' [INST] ' + system_message",)),
    ("mistral-v1", ("[AVAILABLE_TOOLS]", " [INST]")),
    ("mistral-v3-tekken", ("[AVAILABLE_TOOLS]", '"[INST]"')),
    ("mistral-v3", ("[AVAILABLE_TOOLS]",)),
    ("llama2-sys-strip", ("content.strip()",)),
    ("llama2-sys-bos", ("bos_token + '[INST]",)),
    ("llama2-sys", ("<<SYS>>",)),
    ("llama2", ()),
)
_OTHER_RULES: _Rules = (
    ("phi3", ("<|assistant|>", "<|end|>")),
    ("chatglm4", ("[gMASK]<sop>",)),
    ("exaone-moe", ("<|assistant|>", "<|user|>", "<|tool_declare|>")),
    ("falcon3", ("<|assistant|>", "<|user|>", "</s>")),
    ("glmedge", ("<|assistant|>", "<|user|>")),
    ("glmedge", ("<|{{ item['role'] }}|>", "<|begin_of_image|>")),
    ("zephyr", ("<|user|>", "<|endoftext|>")),
    ("monarch", ("bos_token + message['role']",)),
    ("gemma", ("<start_of_turn>",)),
    ("orion", (r"'\n\nAssistant: ' + eos_token",)),
    ("openchat", ("GPT4 Correct ",)),
    ("vicuna-orca", ("USER: ", "ASSISTANT: ", "SYSTEM: ")),
    ("vicuna", ("USER: ", "ASSISTANT: ")),
    ("deepseek", ("### Instruction:", "<|EOT|>")),
    ("command-r", ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>")),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>")),
    ("chatglm3", ("[gMASK]sop",)),
    ("minicpm", ("<用户>",)),
    ("deepseek2", ("'Assistant: ' + message['content'] + eos_token",)),
    (
        "deepseek3",
        ("<\uff5cAssistant\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    ),
    ("exaone4", ("[|system|]", "[|assistant|]", "[|endofturn|]", "[|tool|]")),
    ("exaone3", ("[|system|]", "[|assistant|]", "[|endofturn|]")),
    ("rwkv-world", ("rwkv-world",)),
    ("rwkv-world", (r"{{- 'User: ' + message['content']|trim + '\n\n' -}}",)),
    ("granite-4.0", ("<|start_of_role|>", "<tool_call>", "g4_default_system_message")),
    ("granite-4.0", ("<|start_of_role|>", "<tools>", "g4_default_system_message")),
    ("granite-4.1", ("<|start_of_role|>", "<tool_call>")),
    ("granite-4.1", ("<|start_of_role|>", "<tools>")),
    ("granite", ("<|start_of_role|>",)),
    (
        "gigachat",
        (
            "message['role'] + additional_special_tokens[0] + message['content']"
            " + additional_special_tokens[1]",
        ),
    ),
    ("megrez", ("<|role_start|>",)),
    ("yandex", (" Ассистент:",)),
    ("bailing", ("<role>ASSISTANT</role>", "'HUMAN'")),
    ("bailing-think", ("<role>ASSISTANT</role>", '"HUMAN"', "<think>")),
    ("bailing2", ("<role>ASSISTANT</role>", "<role>HUMAN</role>", "<|role_end|>")),
    ("llama4", ("<|header_start|>", "<|header_end|>")),
    ("dots1", ("<|endofuserprompt|>",)),
    ("hunyuan-moe", ("<|extra_0|>", "<|extra_4|>")),
    ("gpt-oss", ("<|start|>", "<|channel|>")),
    ("hunyuan-vl", ("<\uff5chy_Assistant\uff5c>", "<\uff5chy_begin▁of▁sentence\uff5c>")),
    ("hunyuan-dense", ("<\uff5chy_Assistant\uff5c>", "<\uff5chy_place▁holder▁no▁3\uff5c>")),
    ("kimi-k2", ("<|im_assistant|>assistant<|im_middle|>",)),
    ("seed_oss", ("<seed:bos>",)),
    ("grok-2", ("'Assistant: '  + message['content'] + '<|separator|>",)),
    ("pangu-embedded", ("[unused9]系统\uff1a[unused10]",)),
    ("solar-open", ("<|begin|>", "<|end|>", "<|content|>")),
)


def detect_format(source: str) -> TurnFormat | None:
    """Returns the format that a name or a template's source stands for; None if it is unknown."""
    if source in BUILTIN_FORMATS:
        return BUILTIN_FORMATS[source]
    if "<|im_start|>" in source:
        return _first_fit(_CHATML_RULES, source)
    if source.startswith("mistral") or "[INST]" in source:
        return _first_fit(_INST_RULES, source)
    return _first_fit(_OTHER_RULES, source)


def _first_fit(rules: _Rules, source: str) -> TurnFormat | None:
    for name, marks in rules:
        if all(mark in source for mark in marks):
            return DOTS1 if name == "dots1" else BUILTIN_FORMATS[name]
    return None

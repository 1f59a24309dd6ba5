"""The chat formats that llama.cpp knows by name, and one that it only finds in a template.

Source: llama.cpp `LLM_CHAT_TEMPLATES` and what `llm_chat_apply_template` writes for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.text.turn_format import ASSISTANT, SYSTEM, USER, Turn, TurnFormat

_TOOL = "tool"
_TOOL_CALL = "assistant_tool_call"


def _uniform(before: str, after: str, generation: str, *, is_trimmed: bool = False) -> TurnFormat:
    """Messages of every role are written alike, with its name."""
    return TurnFormat({}, Turn(before, after, is_trimmed), generation)


def _trio(
    system: Turn, user: Turn, assistant: Turn, generation: str, opening: str = ""
) -> TurnFormat:
    """Three roles; messages of others are left out."""
    turns = {SYSTEM: system, USER: user, ASSISTANT: assistant}
    return TurnFormat(turns, generation=generation, opening=opening)


def _pair(
    system: Turn, user: Turn, assistant: Turn, generation: str = "", opening: str = ""
) -> TurnFormat:
    """Two roles; everybody else is the assistant."""
    return TurnFormat({SYSTEM: system, USER: user}, assistant, generation, opening)


def _llama2(system: Turn, *, exchange: str = "[INST] ", is_trimmed: bool = False) -> TurnFormat:
    turns = {SYSTEM: system, USER: Turn("", " [/INST]", is_trimmed)}
    answer = Turn("", "</s>", is_trimmed, ends_exchange=True)
    return TurnFormat(turns, answer, opening="[INST] ", exchange=exchange)


def _mistral(exchange: str, *, user_end: str, answer: str, is_trimmed: bool = False) -> TurnFormat:
    turns = {SYSTEM: Turn("", "\n\n"), USER: Turn("", user_end)}
    closing = Turn(answer, "</s>", is_trimmed, ends_exchange=True)
    return TurnFormat(turns, closing, exchange=exchange)


def _mistral7(space: str) -> TurnFormat:
    return _pair(
        Turn(f"[SYSTEM_PROMPT]{space}", "[/SYSTEM_PROMPT]"),
        Turn(f"[INST]{space}", "[/INST]"),
        Turn(space, "</s>"),
    )


def _exaone(*roles: str, generation: str, shape: tuple[str, str], user_end: str) -> TurnFormat:
    before, after = shape
    turns = {role: Turn(before, after, is_trimmed=True) for role in roles}
    turns[USER] = Turn(before, user_end, is_trimmed=True)
    return TurnFormat(turns, generation=generation)


def _command_r(speaker: str) -> Turn:
    return Turn(
        f"<|START_OF_TURN_TOKEN|><|{speaker}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", is_trimmed=True
    )


_SYS = ("<<SYS>>\n", "\n<</SYS>>\n\n")
_EXAONE = ("[|{role}|]", "[|endofturn|]\n")
_EXAONE_MOE = ("<|{role}|>\n", "<|endofturn|>\n")
_GEMMA_MODEL = Turn("<start_of_turn>model\n", "<end_of_turn>\n", is_trimmed=True)
_GRANITE = Turn("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n")
_GRANITE_OPEN = "<|start_of_role|>assistant<|end_of_role|>"
_GRANITE_4 = TurnFormat(
    {_TOOL_CALL: Turn(f"{_GRANITE_OPEN}<|tool_call|>", "<|end_of_text|>\n")},
    _GRANITE,
    _GRANITE_OPEN,
)

BUILTIN_FORMATS: Mapping[str, TurnFormat] = {
    "bailing": TurnFormat(
        {USER: Turn("<role>HUMAN</role>")}, Turn("<role>{ROLE}</role>"), "<role>ASSISTANT</role>"
    ),
    "bailing-think": TurnFormat(
        {USER: Turn("<role>HUMAN</role>")},
        Turn("<role>{ROLE}</role>"),
        "<role>ASSISTANT</role><think>",
    ),
    "bailing2": TurnFormat(
        {USER: Turn("<role>HUMAN</role>", "<|role_end|>")},
        Turn("<role>{ROLE}</role>", "<|role_end|>"),
        "<role>ASSISTANT</role>",
        default_system="<role>SYSTEM</role>detailed thinking off<|role_end|>",
        is_default_kept=True,
    ),
    "chatglm3": TurnFormat({}, Turn("<|{role}|>\n "), "<|assistant|>", "[gMASK]sop"),
    "chatglm4": TurnFormat({}, Turn("<|{role}|>\n"), "<|assistant|>\n", "[gMASK]<sop>"),
    "chatml": _uniform("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "command-r": _trio(
        _command_r("SYSTEM"),
        _command_r("USER"),
        _command_r("CHATBOT"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "deepseek": _trio(
        Turn(),
        Turn("### Instruction:\n", "\n"),
        Turn("### Response:\n", "\n<|EOT|>\n"),
        "### Response:\n",
    ),
    "deepseek-ocr": TurnFormat({}, Turn()),
    "deepseek2": _trio(
        Turn("", "\n\n"),
        Turn("User: ", "\n\n"),
        Turn("Assistant: ", "<\uff5cend▁of▁sentence\uff5c>"),
        "Assistant:",
    ),
    "deepseek3": _trio(
        Turn("", "\n\n"),
        Turn("<\uff5cUser\uff5c>"),
        Turn("<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
        "<\uff5cAssistant\uff5c>",
    ),
    "exaone-moe": _exaone(
        SYSTEM,
        ASSISTANT,
        _TOOL,
        generation="<|assistant|>\n",
        shape=_EXAONE_MOE,
        user_end="<|endofturn|>\n",
    ),
    "exaone3": _exaone(SYSTEM, ASSISTANT, generation="[|assistant|]", shape=_EXAONE, user_end="\n"),
    "exaone4": _exaone(
        SYSTEM, ASSISTANT, _TOOL, generation="[|assistant|]", shape=_EXAONE, user_end="\n"
    ),
    "falcon3": _uniform("<|{role}|>\n", "\n", "<|assistant|>\n"),
    "gemma": TurnFormat(
        {
            SYSTEM: Turn("", "\n\n", is_trimmed=True),
            ASSISTANT: _GEMMA_MODEL,
            "model": _GEMMA_MODEL,
        },
        Turn("<start_of_turn>{role}\n", "<end_of_turn>\n", is_trimmed=True, takes_system=True),
        "<start_of_turn>model\n",
        holds_system=True,
    ),
    "gigachat": TurnFormat(
        {
            USER: Turn(
                "user<|role_sep|>",
                "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
            ),
            ASSISTANT: Turn("assistant<|role_sep|>", "<|message_sep|>"),
        },
        generation="assistant<|role_sep|>",
        opening="<s>",
        first_system=Turn("", "<|message_sep|>"),
    ),
    "glmedge": _uniform("<|{role}|>\n", "", "<|assistant|>"),
    "gpt-oss": TurnFormat(
        {ASSISTANT: Turn("<|start|>assistant<|message|>", "<|return|>")},
        Turn("<|start|>{role}<|message|>", "<|end|>"),
        "<|start|>assistant",
    ),
    "granite": TurnFormat(
        {
            _TOOL_CALL: Turn(
                "<|start_of_role|>{role}<|end_of_role|><|tool_call|>", "<|end_of_text|>\n"
            )
        },
        _GRANITE,
        _GRANITE_OPEN,
    ),
    "granite-4.0": _GRANITE_4,
    "granite-4.1": _GRANITE_4,
    "grok-2": _trio(
        Turn("System: ", "<|separator|>\n\n", is_trimmed=True),
        Turn("Human: ", "<|separator|>\n\n", is_trimmed=True),
        Turn("Assistant: ", "<|separator|>\n\n"),
        "Assistant:",
    ),
    "hunyuan-dense": TurnFormat(
        {
            USER: Turn("<\uff5chy_User\uff5c>", "<\uff5chy_Assistant\uff5c>"),
            ASSISTANT: Turn("<\uff5chy_Assistant\uff5c>", "<\uff5chy_place▁holder▁no▁2\uff5c>"),
        },
        first_system=Turn("", "<\uff5chy_place▁holder▁no▁3\uff5c>"),
    ),
    "hunyuan-moe": TurnFormat(
        {SYSTEM: Turn("<|startoftext|>", "<|extra_4|>"), ASSISTANT: Turn("", "<|eos|>")},
        Turn("<|startoftext|>", "<|extra_0|>"),
    ),
    "hunyuan-vl": TurnFormat(
        {
            USER: Turn("", "<\uff5chy_User\uff5c>"),
            ASSISTANT: Turn("", "<\uff5chy_Assistant\uff5c>"),
        },
        opening="<\uff5chy_begin▁of▁sentence\uff5c>",
        first_system=Turn("", "<\uff5chy_place▁holder▁no▁3\uff5c>"),
    ),
    "kimi-k2": TurnFormat(
        {
            SYSTEM: Turn("<|im_system|>system<|im_middle|>", "<|im_end|>"),
            USER: Turn("<|im_user|>user<|im_middle|>", "<|im_end|>"),
            ASSISTANT: Turn("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
            _TOOL: Turn("<|im_system|>tool<|im_middle|>", "<|im_end|>"),
        },
        Turn("", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "llama2": _llama2(Turn("", "\n")),
    "llama2-sys": _llama2(Turn(*_SYS)),
    "llama2-sys-bos": _llama2(Turn(*_SYS), exchange="<s>[INST] "),
    "llama2-sys-strip": _llama2(Turn(*_SYS, is_trimmed=True), is_trimmed=True),
    "llama3": _uniform(
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        is_trimmed=True,
    ),
    "llama4": _uniform(
        "<|header_start|>{role}<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        is_trimmed=True,
    ),
    "megrez": _uniform(
        "<|role_start|>{role}<|role_end|>", "<|turn_end|>", "<|role_start|>assistant<|role_end|>"
    ),
    "minicpm": TurnFormat({USER: Turn("<用户>", "<AI>", is_trimmed=True)}, Turn(is_trimmed=True)),
    "mistral-v1": _mistral(" [INST] ", user_end=" [/INST]", answer=" "),
    "mistral-v3": _mistral("[INST] ", user_end="[/INST]", answer=" ", is_trimmed=True),
    "mistral-v3-tekken": _mistral("[INST]", user_end="[/INST]", answer=""),
    "mistral-v7": _mistral7(" "),
    "mistral-v7-tekken": _mistral7(""),
    "monarch": TurnFormat(
        {}, Turn("{role}\n", "</s>\n"), generation="<s>assistant\n", separator="<s>"
    ),
    "openchat": TurnFormat(
        {SYSTEM: Turn("", "<|end_of_turn|>")},
        Turn("GPT4 Correct {Role}: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    "orion": TurnFormat(
        {
            SYSTEM: Turn("", "\n\n"),
            USER: Turn("Human: ", "\n\nAssistant: </s>", takes_system=True),
        },
        Turn("", "</s>"),
        holds_system=True,
    ),
    "pangu-embedded": TurnFormat(
        {
            SYSTEM: Turn("[unused9]系统\uff1a", "[unused10]"),
            USER: Turn("[unused9]用户\uff1a", "[unused10]"),
            ASSISTANT: Turn("[unused9]助手\uff1a", "[unused10]"),
            _TOOL: Turn("[unused9]工具\uff1a", "[unused10]"),
            "function": Turn("[unused9]方法\uff1a", "[unused10]"),
        },
        generation="[unused9]助手\uff1a",
        default_system="[unused9]系统\uff1a[unused10]",
    ),
    "phi3": _uniform("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _uniform(
        "<|im_start|>{role}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"
    ),
    "rwkv-world": TurnFormat(
        {
            SYSTEM: Turn("System: ", "\n\n", is_trimmed=True),
            USER: Turn("User: ", "\n\n", is_trimmed=True),
            ASSISTANT: Turn("Assistant: ", "\n\n", is_trimmed=True),
        },
        reply="Assistant:",
    ),
    "seed_oss": TurnFormat(
        {ASSISTANT: Turn("<seed:bos>assistant\n", "<seed:eos>", is_trimmed=True)},
        Turn("<seed:bos>{role}\n", "<seed:eos>"),
        "<seed:bos>assistant\n",
    ),
    "smolvlm": _pair(
        Turn("", "\n\n"),
        Turn("User: ", "<end_of_utterance>\n"),
        Turn("Assistant: ", "<end_of_utterance>\n"),
        "Assistant:",
        "<|im_start|>",
    ),
    "solar-open": _uniform("<|begin|>{role}<|content|>", "<|end|>", "<|begin|>assistant"),
    "vicuna": _trio(
        Turn("", "\n\n"), Turn("USER: ", "\n"), Turn("ASSISTANT: ", "</s>\n"), "ASSISTANT:"
    ),
    "vicuna-orca": _trio(
        Turn("SYSTEM: ", "\n"), Turn("USER: ", "\n"), Turn("ASSISTANT: ", "</s>\n"), "ASSISTANT:"
    ),
    "yandex": TurnFormat(
        {USER: Turn(" Пользователь: ", "\n\n"), ASSISTANT: Turn(" Ассистент: ", "\n\n")},
        generation=" Ассистент:[SEP]",
    ),
    "zephyr": _uniform("<|{role}|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}

# dots.llm1: has no name, only a template that is known by its content.
DOTS1 = _pair(
    Turn("<|system|>", "<|endofsystem|>"),
    Turn("<|userprompt|>", "<|endofuserprompt|>"),
    Turn("<|response|>", "<|endofresponse|>"),
    "<|response|>",
)

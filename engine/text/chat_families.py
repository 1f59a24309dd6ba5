"""The families of chat models that are known: data, one row each.

A family is known by what its template must contain. Adding one is adding a row. Those that are put
together from blocks are `engine.text.framed_families`.

Source: the templates in llama.cpp's `models/templates`.
"""

from __future__ import annotations

from dataclasses import replace

from engine.text.chat_format import (
    FIXED_THINK,
    PLAIN,
    THINK,
    Block,
    BlockKind,
    ChatFormat,
    ElementFormat,
    LeadingSpace,
    ParameterTags,
    PythonFormat,
    ReasoningTags,
    TaggedFormat,
    ToolFormat,
)
from engine.text.framed_families import FRAMED

# The bar of DeepSeek's tokens.
_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"

_GLM_CALLS = TaggedFormat(
    "<tool_call>",
    "</tool_call>",
    parameter=ParameterTags("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>"),
)
_QWEN_CALLS = TaggedFormat(
    "<tool_call>",
    "</tool_call>",
    call_start="<function=",
    name_end=">",
    call_end="</function>",
    parameter=ParameterTags("<parameter=", ">", "</parameter>", gap="\n"),
)
_COHERE_CALLS = ToolFormat(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    name_key="tool_name",
    arguments_key="parameters",
    id_key="tool_call_id",
    id_first=True,
    is_list=True,
)
_COHERE_THINK = ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>")
_LFM_CALLS = PythonFormat("<|tool_call_start|>", "<|tool_call_end|>")


def _dsml(name: str, section: str) -> ChatFormat:
    """DeepSeek's markup from V3.2 on: each parameter says whether it is a text."""
    calls = TaggedFormat(
        f"<{_DSML}{section}>",
        f"</{_DSML}{section}>",
        call_start=f'<{_DSML}invoke name="',
        name_end='">',
        call_end=f"</{_DSML}invoke>",
        parameter=ParameterTags(
            f'<{_DSML}parameter name="',
            '" string="',
            f"</{_DSML}parameter>",
            kind_marks=('true">', 'false">'),
        ),
        lead="\n\n",
    )
    stops = (calls.lead + calls.start, calls.start)
    return ChatFormat(name, (_DSML, f"{section}>"), calls, THINK, reasoning_stops=stops)


# The more particular come first.
FAMILIES: tuple[ChatFormat, ...] = (
    *FRAMED,
    ChatFormat(
        "kimi-k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions."),
        TaggedFormat(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            call_start="<|tool_call_begin|>functions.",
            name_end="<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            id_start="functions.",
            opens_bare=True,
        ),
        THINK,
        leading_space=LeadingSpace.KEPT,
        reasoning_stops=("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions."),
    ),
    ChatFormat(
        "ling-3",
        ("<role>ASSISTANT</role>", "<arg_key>"),
        _GLM_CALLS,
        THINK,
        blocks=(Block("<|role_end|>", BlockKind.NOTHING, is_mark=True),),
        reasoning_stops=("<tool_call>",),
        stops=("<|role_end|>",),
    ),
    ChatFormat(
        "cohere2-moe",
        ("<|START_TEXT|>", "<|START_ACTION|>"),
        _COHERE_CALLS,
        replace(_COHERE_THINK, end_gap="<|START_TEXT|>"),
        content_start="<|START_TEXT|>",
        blocks=(
            Block("<|START_TEXT|>", BlockKind.CONTENT, ("<|END_TEXT|>",)),
            Block("<|END_OF_TURN_TOKEN|>", BlockKind.NOTHING, is_mark=True),
        ),
        reasoning_stops=("<|START_TEXT|>", "<|START_ACTION|>"),
    ),
    ChatFormat(
        "lfm2",
        ("<|tool_list_start|>", "<|tool_list_end|>"),
        _LFM_CALLS,
        leading_space=LeadingSpace.KEPT,
    ),
    ChatFormat("lfm2.5", ("List of tools: [",), _LFM_CALLS, leading_space=LeadingSpace.KEPT),
    ChatFormat(
        "minimax-m3",
        ("]<]minimax[>[", "<tool_call>", "<invoke name="),
        ElementFormat(
            "]<]minimax[>[<tool_call>",
            "]<]minimax[>[</tool_call>",
            call_start=']<]minimax[>[<invoke name="',
            name_end='">',
            call_end="]<]minimax[>[</invoke>",
            prefix="]<]minimax[>[",
        ),
        ReasoningTags("<mm:think>", "</mm:think>", end_leads=True),
    ),
    ChatFormat(
        "deepseek-r1",
        (f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁sep{_BAR}>", "```json"),
        TaggedFormat(
            f"<{_BAR}tool▁calls▁begin{_BAR}>",
            f"<{_BAR}tool▁calls▁end{_BAR}>",
            call_start=f"<{_BAR}tool▁call▁begin{_BAR}>function<{_BAR}tool▁sep{_BAR}>",
            name_end="\n```json\n",
            call_end=f"```<{_BAR}tool▁call▁end{_BAR}>",
        ),
        THINK,
    ),
    ChatFormat(
        "deepseek-v3.1",
        (f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁sep{_BAR}>"),
        TaggedFormat(
            f"<{_BAR}tool▁calls▁begin{_BAR}>",
            f"<{_BAR}tool▁calls▁end{_BAR}>",
            call_start=f"<{_BAR}tool▁call▁begin{_BAR}>",
            name_end=f"<{_BAR}tool▁sep{_BAR}>",
            call_end=f"<{_BAR}tool▁call▁end{_BAR}>",
        ),
        THINK,
    ),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    ChatFormat(
        "minicpm-5",
        ("Tool usage guidelines:", '<function name="', '<param name="'),
        TaggedFormat(
            '<function name="',
            "</function>",
            name_end='">',
            parameter=ParameterTags(
                '<param name="', '">', "</param>", verbatim=("<![CDATA[", "]]>")
            ),
        ),
        FIXED_THINK,
        leading_space=LeadingSpace.DROPPED,
    ),
    ChatFormat(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        replace(_QWEN_CALLS, opens_bare=True),
        without=("<think>", "<seed:tool_call>"),
        leading_space=LeadingSpace.DROPPED,
    ),
    ChatFormat(
        "qwen3.5",
        ("<tool_call>", "<function=", "<parameter="),
        _QWEN_CALLS,
        FIXED_THINK,
        without=("<seed:tool_call>",),
        leading_space=LeadingSpace.DROPPED,
        reasoning_stops=("<tool_call>",),
    ),
    ChatFormat(
        "hy-3",
        ("'<tool_sep{}>'", "':opensource'"),
        TaggedFormat(
            "<tool_calls:opensource>",
            "</tool_calls:opensource>",
            call_start="<tool_call:opensource>",
            name_end="<tool_sep:opensource>",
            call_end="</tool_call:opensource>",
            parameter=ParameterTags(
                "<arg_key:opensource>",
                "</arg_key:opensource>",
                "</arg_value:opensource>",
                "<arg_value:opensource>",
            ),
        ),
        ReasoningTags("<think:opensource>", "</think:opensource>"),
    ),
    ChatFormat(
        "laguna",
        ("laguna_glm_thinking", "<arg_key>"),
        _GLM_CALLS,
        # The white space that some of its templates write around the tags is the model's.
        replace(THINK, is_fixed=True),
        stops=("</assistant>",),
    ),
    ChatFormat("glm-4", ("<tool_call>", "<arg_key>", "<arg_value>"), _GLM_CALLS, THINK),
    ChatFormat(
        "nemotron-v2",
        ("<TOOLCALL>", "</TOOLCALL>"),
        ToolFormat("<TOOLCALL>", "</TOOLCALL>", is_list=True),
        replace(THINK, start_gap="\n"),
    ),
    ChatFormat(
        "gigachat-3",
        ("<|message_sep|>", "'role': 'function call'"),
        ToolFormat("<|message_sep|>\n\nfunction call<|role_sep|>\n", is_single=True),
    ),
    ChatFormat("gigachat-3.1", ("<|function_call|>",), ToolFormat("<|function_call|>")),
    ChatFormat(
        "minimax-m2",
        ("<minimax:tool_call>", "<invoke name=", "<parameter name="),
        TaggedFormat(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            call_start='<invoke name="',
            name_end='">',
            call_end="</invoke>",
            parameter=ParameterTags('<parameter name="', '">', "</parameter>"),
        ),
        THINK,
    ),
    ChatFormat(
        "minimax-m1",
        ("<tool_calls>", "<beginning_of_sentence>"),
        ToolFormat("<tool_calls>", "</tool_calls>", is_row=True),
    ),
    ChatFormat(
        "seed-oss",
        ("<seed:tool_call>", "<function=", "<parameter="),
        TaggedFormat(
            "<seed:tool_call>",
            "</seed:tool_call>",
            call_start="<function=",
            name_end=">",
            call_end="</function>",
            parameter=ParameterTags("<parameter=", ">", "</parameter>"),
        ),
        ReasoningTags("<seed:think>", "</seed:think>"),
    ),
    ChatFormat(
        "ministral-3",
        ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]"),
        ToolFormat("[TOOL_CALLS]", name_end="[ARGS]"),
        ReasoningTags("[THINK]", "[/THINK]"),
        without=("[CALL_ID]",),
    ),
    ChatFormat(
        "command-r7b",
        ("<|START_ACTION|>", "<|END_ACTION|>", "tool_name"),
        _COHERE_CALLS,
        _COHERE_THINK,
        blocks=(Block("<|START_RESPONSE|>", BlockKind.CONTENT, ("<|END_RESPONSE|>",)),),
    ),
    ChatFormat(
        "mistral-small-3.2",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ToolFormat("[TOOL_CALLS]", name_end="[ARGS]", id_start="[CALL_ID]"),
    ),
    ChatFormat(
        "mistral-nemo",
        ("[TOOL_CALLS][", '"id": "'),
        ToolFormat("[TOOL_CALLS]", id_key="id", is_list=True),
    ),
    ChatFormat(
        "command-r-plus",
        ("Action:\\n```json", "tool_name", "<|CHATBOT_TOKEN|>"),
        ToolFormat(
            "Action:\n```json\n",
            "```",
            name_key="tool_name",
            arguments_key="parameters",
            is_list=True,
        ),
        blocks=(Block("<|CHATBOT_TOKEN|>", BlockKind.CONTENT, ("<|END_OF_TURN_TOKEN|>",)),),
    ),
    ChatFormat(
        "mistral",
        ("[TOOL_CALLS]", '"name"', '"arguments"'),
        ToolFormat("[TOOL_CALLS]", id_key="id", is_list=True),
    ),
    ChatFormat(
        "apertus",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        ToolFormat("<|tools_prefix|>", "<|tools_suffix|>", name_is_key=True, is_list=True),
    ),
    ChatFormat(
        "apriel-1.6",
        ("[BEGIN FINAL RESPONSE]", "<|begin_assistant|>", "<tool_calls>"),
        ToolFormat("<tool_calls>", "</tool_calls>", is_list=True),
        ReasoningTags("", "[BEGIN FINAL RESPONSE]", end_gap="\n"),
        turn_start="<|begin_assistant|>\n",
    ),
    ChatFormat(
        "apriel-1.5",
        ("<tool_calls>[", "<|assistant|>"),
        ToolFormat("<tool_calls>", "</tool_calls>", is_list=True),
    ),
    ChatFormat(
        "functionary-3.1",
        ("<function=", "</function>", "python_tag"),
        ToolFormat("<function=", "</function>", name_end=">"),
    ),
    ChatFormat("firefunction", (" functools[",), ToolFormat(" functools", is_list=True)),
    ChatFormat(
        "granite",
        ("<|tool_call|>", "granite"),
        ToolFormat("<|tool_call|>", is_list=True),
        THINK,
    ),
    ChatFormat(
        "phi", ("<|tool_call|>", "<|/tool_call|>"), ToolFormat("<|tool_call|>", "<|/tool_call|>")
    ),
    ChatFormat(
        "hermes",
        ("<tool_call>", "</tool_call>", '"name"', '"arguments"'),
        ToolFormat("<tool_call>", "</tool_call>"),
    ),
    ChatFormat(
        "llama-3",
        ('"parameters"', "<|start_header_id|>", '{"name"'),
        ToolFormat("", arguments_key="parameters"),
    ),
)


def find_format(template: str) -> ChatFormat:
    """Returns the family of a template; one without calls where none is known.

    Args:
        template: The template's source.
    """
    found = next((family for family in FAMILIES if family.fits(template)), PLAIN)
    if found.reasoning is None and THINK.end in template:
        return replace(found, reasoning=THINK)
    return found

"""The families whose messages are put together from blocks, reasoning being one of them: data.

Source: the templates in llama.cpp's `models/templates`.
"""

from __future__ import annotations

from engine.text.chat_format import (
    Block,
    BlockKind,
    ChatFormat,
    DictFormat,
    ParameterTags,
    ReasoningTags,
    TaggedFormat,
    ToolFormat,
)

_KIMI_THINK = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
_KIMI_ANSWER = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
_KIMI_END = "<|close|>message<|sep|>"

# gpt-oss may write a channel twice, the first time for nothing.
_STRAY = tuple(
    Block(
        f"<|channel|>commentary{to}<|channel|>{channel}", kind, ("<|end|>",), head_end="<|message|>"
    )
    for to in ("", " to=assistant")
    for channel, kind in (("analysis", BlockKind.REASONING), ("final", BlockKind.CONTENT))
)

FRAMED: tuple[ChatFormat, ...] = (
    ChatFormat(
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|end_of_msg|>"),
        TaggedFormat(
            "<|open|>tools<|sep|>",
            "<|close|>tools<|sep|>",
            call_start='<|open|>call tool="',
            name_end='"',
            head_end="<|sep|>",
            call_end="<|close|>call<|sep|>",
            parameter=ParameterTags(
                '<|open|>argument key="', '"', "<|close|>argument<|sep|>", head_end="<|sep|>"
            ),
        ),
        ReasoningTags(*_KIMI_THINK, end_gap=_KIMI_ANSWER[0]),
        blocks=(
            Block(
                _KIMI_THINK[0],
                BlockKind.REASONING,
                _KIMI_THINK[1:],
                _KIMI_ANSWER[:1],
                stays=True,
            ),
            Block(
                _KIMI_ANSWER[0],
                BlockKind.CONTENT,
                _KIMI_ANSWER[1:],
                ("<|open|>tools<|sep|>", _KIMI_END),
            ),
            Block(_KIMI_END, BlockKind.NOTHING, is_mark=True),
            Block("<|end_of_msg|>", BlockKind.NOTHING, is_mark=True),
        ),
        turn_start='<|open|>message role="assistant"<|sep|>',
    ),
    ChatFormat(
        "muse",
        ("<atem:function_calls>", "<|eom|>"),
        TaggedFormat(
            "<|message|><atem:function_calls>",
            "</atem:function_calls>",
            call_start='<atem:invoke name="',
            name_end='">',
            call_end="</atem:invoke>",
            parameter=ParameterTags('<atem:parameter name="', '">', "</atem:parameter>"),
            recipient=" to=",
            between="<|eom|><|start|>assistant",
        ),
        ReasoningTags(
            " to=self<|message|>", "<|eom|>", end_gap="<|start|>assistant to=user<|message|>"
        ),
        content_start=" to=user<|message|>",
        blocks=(
            Block(" to=self<|message|>", BlockKind.REASONING, ("<|eom|>",), stays=True),
            Block(" to=user<|message|>", BlockKind.CONTENT, ("<|eot|>", "<|eom|>")),
            Block("<|message|>", BlockKind.CONTENT, ("<|eot|>", "<|eom|>")),
            Block(" to=", BlockKind.NOTHING, stops=("<|message|>",)),
            Block("<|eom|>", BlockKind.NOTHING, is_mark=True),
        ),
        turn_start="<|start|>assistant",
        header="<|start|>assistant",
    ),
    ChatFormat(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        ToolFormat(
            "<|channel|>commentary to=functions.",
            name_end="<|message|>",
            note_starts=("<|constrain|>", "<|channel|>", " "),
            is_single=True,
            other_starts=("<|channel|>analysis to=functions.", " to=functions."),
        ),
        ReasoningTags(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            end_gap="<|start|>assistant<|channel|>final<|message|>",
        ),
        content_start="<|channel|>final<|message|>",
        blocks=(
            Block("<|channel|>analysis<|message|>", BlockKind.REASONING, ("<|end|>",)),
            Block("<|channel|>commentary<|message|>", BlockKind.CONTENT, ("<|end|>",)),
            Block("<|channel|>final", BlockKind.CONTENT, ("<|end|>",), head_end="<|message|>"),
            # Calls of tools that the model knows, and nobody offered.
            Block("<|channel|>commentary to=", BlockKind.NOTHING, ("<|end|>",)),
            Block("<|channel|>analysis to=", BlockKind.NOTHING, ("<|end|>",)),
            Block(" to=", BlockKind.NOTHING, ("<|end|>",)),
            *_STRAY,
        ),
        turn_start="<|start|>assistant",
        header="<|start|>assistant",
    ),
    ChatFormat(
        "solar-open",
        ("<|begin|>assistant<|think|>", "<|tool_calls|>", "<|tool_call:begin|>"),
        TaggedFormat(
            "<|tool_calls|>",
            "<|calls|>",
            call_start="<|tool_call:begin|>",
            id_end="<|tool_call:name|>",
            name_end="<|tool_call:args|>",
            call_end="<|tool_call:end|>",
        ),
        ReasoningTags("<|think|>", "<|end|>", end_gap="<|begin|>assistant<|content|>"),
        content_start="<|content|>",
        blocks=(
            Block("<|think|>", BlockKind.REASONING, ("<|end|>",)),
            Block("<|content|>", BlockKind.CONTENT, ("<|end|>",)),
        ),
        turn_start="<|begin|>assistant",
        header="<|begin|>assistant",
    ),
    ChatFormat(
        "gemma-4",
        ("'<|tool_call>call:'",),
        DictFormat("<|tool_call>call:", "<tool_call|>", quote='<|"|>'),
        ReasoningTags("<|channel>thought", "<channel|>", start_gap="\n"),
        blocks=(
            Block("<|channel>thought", BlockKind.REASONING, ("<channel|>",)),
            Block("<|channel>", BlockKind.NOTHING, is_mark=True),
            Block("<channel|>", BlockKind.NOTHING, stops=("<|tool_call>call:",)),
        ),
        turn_start="<|turn>model\n",
    ),
    ChatFormat(
        "functionary-3.2",
        (">>>all", ">>>${recipient}"),
        ToolFormat(">>>", name_end="\n", is_open=True),
        content_start="all\n",
        blocks=(Block(">>>all\n", BlockKind.CONTENT, stops=(">>>",)),),
        turn_start="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
)

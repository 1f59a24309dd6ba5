"""The blocks of a message of Anthropic's: numbered in order of arrival, streamed as in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from kvarts.v1 import generation_pb2

from gateway.anthropic import MessagesDialect
from gateway.reply import ChatDelta

_TEXT, _OTHER = ChatDelta(content="a"), ChatDelta(content="b")
_THOUGHT = ChatDelta(reasoning="hm")
_CALL = ChatDelta(
    tool_call=generation_pb2.ToolCallDelta(index=0, id="c", name="f", arguments_json="{}")
)


def _dialect() -> MessagesDialect:
    return MessagesDialect(cast("Any", None), prefill=())


def _assembled(deltas: Sequence[ChatDelta]) -> list[tuple[str, str]]:
    """What a client makes of the events: it appends what starts, and adds by number."""
    dialect = _dialect()
    blocks: list[tuple[str, str]] = []
    for delta in deltas:
        for event in cast("list[Any]", dialect.grown(delta)):
            data = event["data"]
            if data["type"] == "content_block_start":
                assert data["index"] == len(blocks)
                blocks.append((data["content_block"]["type"], ""))
                continue
            kind, text = blocks[int(data["index"])]
            added = data["delta"]
            assert added["type"].split("_")[0] == ("input" if kind == "tool_use" else kind)
            piece = next(value for key, value in added.items() if key != "type")
            blocks[int(data["index"])] = (kind, text + piece)
    return blocks


@pytest.mark.parametrize(
    ("deltas", "blocks"),
    [
        ([_THOUGHT, _TEXT, _CALL], [("thinking", "hm"), ("text", "a"), ("tool_use", "{}")]),
        # A preamble, then the analysis, then the answer.
        ([_TEXT, _THOUGHT, _OTHER], [("text", "a"), ("thinking", "hm"), ("text", "b")]),
        ([_TEXT, _CALL, _OTHER], [("text", "a"), ("tool_use", "{}"), ("text", "b")]),
        ([_TEXT, _OTHER], [("text", "ab")]),
    ],
)
def test_pieces_go_where_they_belong(
    deltas: Sequence[ChatDelta], blocks: Sequence[tuple[str, str]]
) -> None:
    assert _assembled(deltas) == blocks

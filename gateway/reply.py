"""The assistant's message as it grows: what the text of a chat adds to it, and what it has become.

Knows no dialect; the service tells reasoning, content and calls apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvarts.v1 import generation_pb2

from gateway.facts import random_id

ChatDelta = generation_pb2.ChatDelta


@dataclass
class Call:
    """A tool call; `arguments` are pieces of JSON text."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])

    @property
    def arguments_json(self) -> str:
        """The arguments so far."""
        return "".join(self.arguments)


class Reply:
    """What one sample has said so far."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[Call] = []

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    @property
    def has_reasoning(self) -> bool:
        """Whether any reasoning has come."""
        return bool(self._reasoning)

    @property
    def has_content(self) -> bool:
        """Whether any content has come."""
        return bool(self._content)

    def add(self, delta: ChatDelta) -> None:
        """Takes one piece; the first piece of a call has its name."""
        match delta.WhichOneof("delta"):
            case "reasoning":
                self._reasoning.append(delta.reasoning)
            case "content":
                self._content.append(delta.content)
            case "tool_call":
                self._add_call(delta.tool_call)
            case None:
                pass

    def _add_call(self, piece: generation_pb2.ToolCallDelta) -> None:
        if piece.name:
            self.calls.append(Call(piece.id, piece.name))
        if piece.arguments_json and self.calls:
            self.calls[-1].arguments.append(piece.arguments_json)


def with_ids(deltas: Iterable[ChatDelta]) -> list[ChatDelta]:
    """Gives an id to every call that begins without one, as the peer does."""
    named: list[ChatDelta] = []
    for delta in deltas:
        if delta.tool_call.name and not delta.tool_call.id:
            named.append(ChatDelta())
            named[-1].CopyFrom(delta)
            named[-1].tool_call.id = random_id()
        else:
            named.append(delta)
    return named


def behind(owed: Sequence[ChatDelta], deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
    """Puts what a message already held in front of what it grew by, joining texts of one kind."""
    if not (owed and deltas):
        return [*owed, *deltas]
    last, first = owed[-1], deltas[0]
    if last.HasField("content") and first.HasField("content"):
        return [*owed[:-1], ChatDelta(content=last.content + first.content), *deltas[1:]]
    if last.HasField("reasoning") and first.HasField("reasoning"):
        return [*owed[:-1], ChatDelta(reasoning=last.reasoning + first.reasoning), *deltas[1:]]
    return [*owed, *deltas]

"""A last message of the assistant that is continued: what it holds, and where in it the turn stands.

Knows no template; what opens the turn and stands around reasoning is given.

Source: llama.cpp `peg_generator::generate_parser`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarts.v1 import common_pb2

from engine.errors import InvalidField, NotSupported
from engine.text.chat_format import ChatFormat, ReasoningTags


@dataclass(frozen=True)
class OpenTurn:
    """What a turn holds; `is_thinking`: it goes on inside its reasoning."""

    content: str
    reasoning: str
    is_thinking: bool

    def text(self, chat_format: ChatFormat) -> str:
        """Returns the turn as the family writes it, from the mark of its reasoning on."""
        reasoning = chat_format.reasoning
        if reasoning is None:
            return chat_format.content_start + self.content
        thought = f"{reasoning.start}{reasoning.start_gap}{self.reasoning}"
        if self.is_thinking:
            return thought
        return f"{thought}{reasoning.end_lead}{reasoning.end}{reasoning.end_gap}{self.content}"

    def behind(self, prompt: str, opening_at: int, chat_format: ChatFormat) -> str:
        """Returns the prompt with the turn behind its opening.

        Args:
            prompt: Ends with the opening of the turn, which may hold reasoning itself.
            opening_at: Where the opening begins.
            chat_format: How the family writes a turn.
        """
        reasoning = chat_format.reasoning
        at = prompt.find(reasoning.start, opening_at) if reasoning and reasoning.start else -1
        return (prompt if at < 0 else prompt[:at]) + self.text(chat_format)


def open_turn(chat: common_pb2.ChatPrompt, reasoning: ReasoningTags | None, field: str) -> OpenTurn:
    """Returns what the last message of a conversation holds.

    Raises:
        InvalidField: It cannot be continued.
        NotSupported: It has reasoning, and the model does not think.
    """
    if not chat.messages or chat.messages[-1].role != "assistant":
        raise InvalidField(
            f"{field}.final_message", "continues, but the last message is not the assistant's"
        )
    last = chat.messages[-1]
    name = f"{field}.messages[{len(chat.messages) - 1}]"
    if last.tool_calls:
        raise InvalidField(f"{name}.tool_calls", "a message with tool calls cannot be continued")
    if len(chat.messages) > 1 and chat.messages[-2].role == "assistant":
        raise InvalidField(f"{name}.role", "two assistant messages end the conversation")
    content = last.content
    if last.WhichOneof("body") == "parts":
        content = "\n\n".join(part.text for part in last.parts.parts)
    is_thinking = chat.final_message == common_pb2.FINAL_MESSAGE_CONTINUED_REASONING
    if chat.final_message != common_pb2.FINAL_MESSAGE_CONTINUED_CONTENT and not content:
        is_thinking = is_thinking or bool(last.reasoning)
    if reasoning is None and (is_thinking or last.reasoning):
        raise NotSupported("continuing reasoning (this model's template has none)")
    return OpenTurn("" if is_thinking else content, last.reasoning, is_thinking)

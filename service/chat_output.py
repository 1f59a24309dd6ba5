"""What becomes of a chat's answer: which grammar calls follow, and its parts as they arrive.

Source: llama.cpp `peg_generator::generate_parser` for when calls are constrained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvarts.v1 import common_pb2, generation_pb2

from engine.constraint import Constraint
from engine.errors import InvalidField, NotSupported
from engine.text.call_piece import CallPiece
from engine.text.call_triggers import call_triggers
from engine.text.chat_format import CallFormat, ChatFormat
from engine.text.chat_grammar import call_grammar
from engine.text.chat_parser import Content, Delta, MessageParser, Reasoning
from engine.text.grammar.lazy import CallGrammar
from engine.text.parameter_kinds import ParameterKinds
from engine.text.tagged_grammar import CallableTool
from service.chat import RenderedChat
from service.constraint import shapes_answer
from service.json_text import json_object
from service.loaded import LoadedModel
from service.reasoning import mark_tokens, reasoning_format, shown_marks

ChatDelta = generation_pb2.ChatDelta
GenerateRequest = generation_pb2.GenerateRequest

_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class ChatOutput:
    """How the answers of one call are made and read. `shown` tokens belong to the format's marks.

    `stops` end an answer beside those of its request.
    """

    constraint: Constraint | None
    shown: frozenset[int]
    begin: Callable[[], ChatReader]
    stops: tuple[str, ...] = ()


class ChatReader:
    """Reads one answer; `echo` is told before it."""

    def __init__(
        self,
        parsers: Sequence[tuple[MessageParser, bool]],
        echo: Sequence[ChatDelta],
        opening: str,
        *,
        is_known: bool,
    ) -> None:
        """Begins an answer. Of a parser paired with True only the reasoning counts.

        `opening` is what the prompt holds of the message; `is_known`: the client has it already.
        """
        self._parsers = parsers
        self._opened = list(echo)
        for parser, only_reasoning in parsers:
            if is_known:
                parser.resume(opening)
            else:
                self._opened += _told(parser.push(opening), only_reasoning=only_reasoning)

    def push(self, text: str, *, is_last: bool = False) -> list[ChatDelta]:
        """Returns what a text adds to the message."""
        deltas, self._opened = self._opened, []
        for parser, only_reasoning in self._parsers:
            told = parser.push(text) + (parser.finish() if is_last else [])
            deltas += _told(told, only_reasoning=only_reasoning)
        return deltas


def _told(deltas: Sequence[Delta], *, only_reasoning: bool) -> list[ChatDelta]:
    return [
        _message(delta) for delta in deltas if not only_reasoning or isinstance(delta, Reasoning)
    ]


def plan_output(request: GenerateRequest, chat: RenderedChat, model: LoadedModel) -> ChatOutput:
    """Decides how a chat's answers are constrained and read. Slow: not for an event loop.

    Raises:
        BadSchema: A tool's parameters cannot be read.
        InvalidField: Tools beside a grammar of the request's own, or parameters that are no JSON.
        NotSupported: A call is required, but how the model writes calls is not known.
    """
    chat_format = model.chat_format
    tools = _offered(request, model)
    constraint = None
    shown: frozenset[int] = frozenset()
    if tools is not None:
        if request.WhichOneof("constraint") is not None and (
            request.grammar or request.json_schema
        ):
            raise InvalidField("grammar", "a grammar or schema beside tools")
        shown = mark_tokens(tools.marks, model)
        constraint = _constraint(request, tools, shown, model)
    if chat_format.reasoning is not None:
        shown |= shown_marks(chat_format.reasoning, model)
    begin = _beginner(request, chat, model, chat_format, tools)
    return ChatOutput(constraint, shown, begin, chat_format.stops)


def _offered(request: GenerateRequest, model: LoadedModel) -> CallFormat | None:
    chat, chat_format = request.chat, model.chat_format
    if not chat.tools or chat.tool_choice == common_pb2.TOOL_CHOICE_NONE:
        return None
    is_required = chat.tool_choice == common_pb2.TOOL_CHOICE_REQUIRED
    if chat_format.tools is None and is_required and model.parses_chat:
        raise NotSupported("required tool calls (how this model's template writes them is unknown)")
    return chat_format.tools


def _constraint(
    request: GenerateRequest,
    tools: CallFormat,
    shown: frozenset[int],
    model: LoadedModel,
) -> Constraint:
    chat = request.chat
    parallel = model.facts.chat_capabilities.get("parallel_tool_calls", False)
    if chat.HasField("parallel_tool_calls"):
        parallel = chat.parallel_tool_calls
    grammar = call_grammar(tools, _callable(request), parallel=parallel)
    compiled = model.grammars.compile_schema(
        grammar, shown=shown | frozenset(request.preserved_tokens)
    )
    is_required = chat.tool_choice == common_pb2.TOOL_CHOICE_REQUIRED
    if not tools.start and is_required:
        return compiled
    triggers = call_triggers(model.chat_format, tools, [tool.name for tool in chat.tools])
    return CallGrammar(compiled, triggers, is_required=is_required)


def _callable(request: GenerateRequest) -> list[CallableTool]:
    return [
        CallableTool(
            tool.name,
            json_object(tool.parameters_json or _ANY_OBJECT, f"chat.tools[{i}].parameters_json"),
        )
        for i, tool in enumerate(request.chat.tools)
    ]


def _beginner(
    request: GenerateRequest,
    chat: RenderedChat,
    model: LoadedModel,
    chat_format: ChatFormat,
    tools: CallFormat | None,
) -> Callable[[], ChatReader]:
    reading = reasoning_format(request, model)
    reads_reasoning = reading != generation_pb2.REASONING_FORMAT_NONE
    keeps_reasoning = reading == generation_pb2.REASONING_FORMAT_DEEPSEEK_LEGACY
    is_shaped = shapes_answer(request, model)
    kinds = ParameterKinds((tool.name, tool.parameters) for tool in _callable(request))
    echo = [ChatDelta(reasoning=chat.echoed_reasoning)] if chat.echoed_reasoning else []
    echo += [ChatDelta(content=chat.echo)] if chat.echo else []

    def parser(*, reads: bool) -> MessageParser:
        return MessageParser(
            chat_format,
            parses_tools=tools is not None,
            reads_reasoning=reads,
            kinds=kinds,
            is_shaped=is_shaped,
        )

    def begin() -> ChatReader:
        parsers = [(parser(reads=reads_reasoning and not keeps_reasoning), False)]
        if keeps_reasoning:
            parsers.insert(0, (parser(reads=True), True))
        return ChatReader(parsers, echo, chat.opening, is_known=chat.is_continued)

    return begin


def _message(delta: Delta) -> ChatDelta:
    match delta:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning=text)
        case CallPiece():
            return ChatDelta(
                tool_call=generation_pb2.ToolCallDelta(
                    index=delta.index,
                    id=delta.call_id,
                    name=delta.name,
                    arguments_json=delta.arguments,
                )
            )

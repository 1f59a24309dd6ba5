"""What a request restricts its output to, compiled before it may wait for a slot.

Compiling runs on a thread: it takes milliseconds, and the first grammar of a vocabulary more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvarts.v1 import generation_pb2

from engine.constraint import Constraint
from engine.errors import InvalidField
from engine.text.chat_grammar import answer_grammar
from engine.text.grammar.lazy import LazyGrammar, PatternError, Triggers
from engine.text.grammar.matcher import CompiledGrammar
from engine.text.grammar.schema_gbnf import schema_to_gbnf
from service.chat import RenderedChat
from service.json_text import parse_json
from service.loaded import LoadedModel
from service.reasoning import reasoning_format, shown_marks

GenerateRequest = generation_pb2.GenerateRequest


async def read_constraint(
    request: GenerateRequest, model: LoadedModel, chat: RenderedChat | None = None
) -> Constraint | None:
    """Compiles the constraint of a checked request; None where it has none.

    `chat` is the conversation that it answers; a schema then shapes the answer behind its reasoning.

    Raises:
        BadGrammar: The grammar cannot be parsed or is too complex.
        BadSchema: The schema is malformed, or a keyword cannot be honoured.
        InvalidField: The schema is no JSON, or a trigger is malformed.
    """
    kind = request.WhichOneof("constraint")
    if kind == "grammar" and not request.grammar:
        return None
    if kind is None and not model.defaults.grammar:
        return None
    if chat is not None and shapes_answer(request, model):
        return await asyncio.to_thread(_compile_answer, request, model, chat)
    return await asyncio.to_thread(_compile, request, model)


def shapes_answer(request: GenerateRequest, model: LoadedModel) -> bool:
    """Whether a schema shapes a chat's message, instead of all its text."""
    is_schema = request.WhichOneof("constraint") == "json_schema"
    return is_schema and not request.grammar_lazy and model.parses_chat


def _compile_answer(request: GenerateRequest, model: LoadedModel, chat: RenderedChat) -> Constraint:
    reads = reasoning_format(request, model) != generation_pb2.REASONING_FORMAT_NONE
    tags = model.chat_format.reasoning if reads else None
    grammar = answer_grammar(
        parse_json(request.json_schema, "json_schema"),
        tags,
        is_open=bool(chat.thinking),
        content_start=model.chat_format.content_start,
        is_strict=not request.lenient_schema,
    )
    shown = frozenset(request.preserved_tokens)
    if tags is not None:
        shown |= shown_marks(tags, model)
    return model.grammars.compile_schema(grammar, shown=shown)


def _compile(request: GenerateRequest, model: LoadedModel) -> Constraint:
    preserved = frozenset(request.preserved_tokens)
    if not request.grammar_lazy:
        return _compile_text(request, model, preserved)
    triggers = _triggers(request, model)
    shown = preserved | triggers.tokens
    return LazyGrammar(_compile_text(request, model, shown), triggers)


def _compile_text(
    request: GenerateRequest, model: LoadedModel, shown: frozenset[int]
) -> CompiledGrammar:
    match request.WhichOneof("constraint"):
        case "grammar":
            return model.grammars.compile(request.grammar, shown=shown)
        case "json_schema":
            schema = parse_json(request.json_schema, "json_schema")
            grammar = schema_to_gbnf(schema, is_strict=not request.lenient_schema).grammar
            return model.grammars.compile_schema(grammar, shown=shown)
        case _:
            return model.grammars.compile(model.defaults.grammar, shown=shown)


def _triggers(request: GenerateRequest, model: LoadedModel) -> Triggers:
    tokens: list[int] = []
    words: list[str] = []
    patterns: list[str] = []
    full_patterns: list[str] = []
    for i, trigger in enumerate(request.grammar_triggers):
        match trigger.WhichOneof("trigger"):
            case "token_id":
                tokens.append(trigger.token_id)
            case "word":
                token_id = _preserved_word(request, model, trigger.word, i)
                if token_id is None:
                    words.append(trigger.word)
                else:
                    tokens.append(token_id)
            case "pattern":
                patterns.append(_checked(trigger.pattern, f"grammar_triggers[{i}].pattern"))
            case _:
                full = _checked(trigger.full_pattern, f"grammar_triggers[{i}].full_pattern")
                full_patterns.append(full)
    return Triggers.of(tokens=tokens, words=words, patterns=patterns, full_patterns=full_patterns)


def _preserved_word(
    request: GenerateRequest, model: LoadedModel, word: str, index: int
) -> int | None:
    """Returns the one token that a word is, which must be shown; None if it is several."""
    token_ids: Sequence[int] = model.tokenizer.encode(word, add_special=False, parse_special=True)
    if len(token_ids) != 1:
        return None
    if token_ids[0] not in request.preserved_tokens:
        raise InvalidField(
            f"grammar_triggers[{index}].word",
            f"is the one token {token_ids[0]}, which preserved_tokens must hold",
        )
    return token_ids[0]


def _checked(pattern: str, field: str) -> str:
    try:
        Triggers.of(full_patterns=[pattern])
    except PatternError as error:
        raise InvalidField(field, str(error)) from error
    return pattern

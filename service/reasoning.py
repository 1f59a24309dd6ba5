"""How long a request's answer may think: its own words, the server's and the template's, as tokens.

Source: llama.cpp `oaicompat_chat_params_parse` and the reasoning fields of its request schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvarts.v1 import generation_pb2

from engine.constraint import Constraint
from engine.errors import InvalidField
from engine.requests import ReasoningBudget
from engine.text.chat_format import ReasoningTags
from service.chat import RenderedChat
from service.convert import REASONING_FORMATS
from service.loaded import LoadedModel

_UNLIMITED = 2**31 - 1


def reasoning_format(
    request: generation_pb2.GenerateRequest, model: LoadedModel
) -> generation_pb2.ReasoningFormat.ValueType:
    """Returns the request's format, or the server's."""
    return request.reasoning.format or REASONING_FORMATS[model.defaults.reasoning.format]


async def read_budget(
    request: generation_pb2.GenerateRequest,
    chat: RenderedChat | None,
    constraint: Constraint | None,
    model: LoadedModel,
) -> ReasoningBudget | None:
    """Returns the limit of the answer's thinking; None where nothing depends on it.

    Its texts are tokenised on a thread.

    Args:
        request: Checked.
        chat: The conversation as it was rendered, None for another prompt.
        constraint: What restricts the answer.
        model: The model that answers.

    Raises:
        InvalidField: There is a limit, but nothing says what opens or closes reasoning.
    """
    own, defaults = request.reasoning, model.defaults.reasoning
    tags = model.chat_format.reasoning if chat is not None else None
    start = own.start_tag or (tags.start if tags else "")
    ends = list(own.end_tags) or ([tags.end] if tags else [])
    limit = own.budget_tokens if own.HasField("budget_tokens") else -1
    if chat is not None and limit < 0:
        limit = defaults.budget_tokens
    if not (start and ends):
        if limit >= 0 and chat is None:
            raise InvalidField("reasoning.budget_tokens", "needs start_tag and end_tags")
        return None
    is_lazy = constraint is not None and constraint.is_lazy
    if limit < 0 and not is_lazy:
        return None
    message = own.budget_message if own.HasField("budget_message") else defaults.budget_message

    def tokenise() -> ReasoningBudget:
        closing = tuple(_tokens(end, model) for end in ends)
        return ReasoningBudget(
            tokens=_UNLIMITED if limit < 0 else limit,
            start=_tokens(start, model),
            ends=closing,
            forced=_tokens(message, model) + closing[0],
            opening=_tokens(chat.thinking, model) if chat is not None else (),
            holds_constraint=is_lazy,
        )

    return await asyncio.to_thread(tokenise)


def shown_marks(tags: ReasoningTags, model: LoadedModel) -> frozenset[int]:
    """Returns the tokens of the marks of reasoning whose text must be seen."""
    return mark_tokens((tags.start, tags.end, tags.end_gap.strip()), model)


def mark_tokens(marks: Iterable[str], model: LoadedModel) -> frozenset[int]:
    """Returns those tokens of marks whose text must be seen: the hidden ones, and whole marks.

    An end of generation is none of them.
    """
    found: set[int] = set()
    for mark in marks:
        tokens = _tokens(mark, model)
        hidden = [token for token in tokens if not model.tokenizer.piece(token)]
        found.update(tokens if len(tokens) == 1 else hidden)
    return frozenset(found) - model.tokenizer.eog_tokens


def _tokens(text: str, model: LoadedModel) -> tuple[int, ...]:
    if not text:
        return ()
    return tuple(model.tokenizer.encode(text, add_special=False, parse_special=True))

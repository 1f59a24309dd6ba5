"""The shapes that a `prompt` may have, and their tokens.

A prompt is a text, a list of token ids, a mix of both, or an object that holds one; a list
without integers at its top is a batch of those. This module knows no other field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvarts.v1 import tokenization_pb2

from gateway.backend import Backend
from gateway.errors import invalid, wrong_type
from gateway.off_loop import in_pieces, off_loop
from gateway.service import answer
from gateway.together import together

_SHAPES = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt '
    "string, or a list of mixed strings & tokens."
)
_NO_MEDIA = "Multimodal data provided, but model does not support multimodal requests."
# Each is a request of its own, and an answer.
MAX_PROMPTS = 1024
# Tokenise calls that one body keeps in flight.
_MAX_CALLS = 8


@dataclass(frozen=True)
class Prompt:
    """One prompt: texts and token ids in order. Only a leading text gets BOS.

    `has_text`: tokenising is needed at all. `weight` is how long it is, in characters and ids. Both
    are found where a prompt is made, which for millions of ids is not the loop.
    """

    parts: tuple[str | int, ...]
    has_text: bool = field(init=False)
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        texts = [part for part in self.parts if isinstance(part, str)]
        object.__setattr__(self, "has_text", bool(texts))
        object.__setattr__(self, "weight", len(self.parts) + sum(map(len, texts)))


def read_prompts(value: Any) -> list[Prompt]:
    """Reads the `prompt` of a body: one prompt, or a batch.

    Raises:
        ApiError: the value has none of the shapes, or is an empty or too large batch.
    """
    if not isinstance(value, list):
        return [read_prompt(value)]
    items = cast("list[Any]", value)
    if any(_is_integer(item) for item in items):
        return [read_prompt(items)]
    if not items:
        raise invalid('"prompt" must not be empty')
    if len(items) > MAX_PROMPTS:
        raise invalid(f'"prompt" has {len(items)} prompts, the limit is {MAX_PROMPTS}')
    return [read_prompt(item) for item in items]


def read_prompt(value: Any) -> Prompt:
    """Reads one prompt: a text, ids, a mix of both, or an object that holds a mix.

    Raises:
        ApiError: the value has none of the shapes.
    """
    if isinstance(value, str):
        return Prompt((value,))
    if isinstance(value, Mapping):
        return _read_object(cast("Mapping[str, Any]", value))
    if not isinstance(value, list):
        raise invalid(_SHAPES)
    items = cast("list[Any]", value)
    has_text = any(isinstance(item, str) for item in items)
    if all(_is_integer(item) for item in items):
        return Prompt(tuple(items))
    if not has_text or not any(_is_integer(item) for item in items):
        raise invalid(_SHAPES)
    return _mixed_or_invalid(items)


def read_mixed(value: Any) -> Prompt:
    """Reads a text, or a list of texts and ids.

    Raises:
        ValueError: an element is neither, in the peer's words.
    """
    if isinstance(value, str):
        return Prompt((value,))
    if not isinstance(value, list):
        raise ValueError(wrong_type("string", value))
    return Prompt(tuple(_read_part(item) for item in cast("list[Any]", value)))


def check_vocabulary(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Checks every id that was given as a number.

    Raises:
        ApiError: an id is negative, or at or past the vocabulary's end.
    """
    for prompt in prompts:
        for part in prompt.parts:
            if isinstance(part, int) and not 0 <= part < vocab_size:
                raise invalid("Prompt contains invalid tokens")


async def tokenize_all(
    backend: Backend,
    prompts: Sequence[Prompt],
    *,
    add_special: bool = True,
    parse_special: bool = True,
) -> list[tuple[int, ...]]:
    """Turns prompts into token ids, in order.

    Raises:
        ModelChanged: another model is served than the one that is known.
        ApiError: the service refused a call or is gone.
    """
    tokens: list[tuple[int, ...]] = [()] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for index, prompt in waiting:
            tokens[index] = await tokenize(
                backend, prompt, add_special=add_special, parse_special=parse_special
            )

    num_texts = sum(prompt.has_text for prompt in prompts)
    if num_texts <= 1:
        await work()
        return tokens
    async with together() as works:
        for _ in range(min(_MAX_CALLS, num_texts)):
            works.create_task(work())
    return tokens


async def tokenize(
    backend: Backend,
    prompt: Prompt,
    *,
    add_special: bool = True,
    parse_special: bool = True,
) -> tuple[int, ...]:
    """Turns one prompt into token ids; one of ids alone needs no call.

    Raises:
        ModelChanged: another model is served than the one that is known.
        ApiError: the service refused the call or is gone.
    """
    if not prompt.has_text:
        return cast("tuple[int, ...]", prompt.parts)
    request = await off_loop(
        lambda: tokenize_request(prompt, add_special=add_special, parse_special=parse_special),
        weight=prompt.weight,
    )
    request.vocabulary = backend.vocabulary
    call = backend.service.tokenization.Tokenize(request, metadata=backend.metadata)
    reply = await answer(call)
    return await off_loop(lambda: tuple(ids_of(reply)), weight=num_tokens(reply))


def ids_of(reply: tokenization_pb2.TokenizeResponse) -> list[int]:
    """The ids of an answer to `tokenize_request`; a service of before sends them one by one."""
    return list(in_pieces(reply.ids)) or [token.id for token in reply.tokens]


def num_tokens(reply: tokenization_pb2.TokenizeResponse) -> int:
    """How many tokens an answer has, in whichever form."""
    return len(reply.ids) + len(reply.tokens)


def tokenize_request(
    prompt: Prompt, *, add_special: bool, parse_special: bool, has_pieces: bool = False
) -> tokenization_pb2.TokenizeRequest:
    """The call that tokenises a prompt; `has_pieces` asks for more than the ids."""
    request = tokenization_pb2.TokenizeRequest(
        add_special=add_special,
        parse_special=parse_special,
        omit_pieces=not has_pieces,
        ids_only=not has_pieces,
    )
    match prompt.parts:
        case (str() as text,):
            request.text = text
        case parts:
            for part in parts:
                _add_part(request.mixed, part)
    return request


def _add_part(mixed: tokenization_pb2.MixedPrompt, part: str | int) -> None:
    """Adds a text, or an id to the ids before it."""
    if isinstance(part, str):
        mixed.parts.add(text=part)
        return
    if not mixed.parts or mixed.parts[-1].WhichOneof("part") == "text":
        mixed.parts.add()
    mixed.parts[-1].tokens.ids.append(part)


def _read_object(value: Mapping[str, Any]) -> Prompt:
    if "prompt_string" not in value:
        raise invalid(_SHAPES)
    if "multimodal_data" in value:
        raise invalid(_NO_MEDIA)
    return _mixed_or_invalid(value["prompt_string"])


def _mixed_or_invalid(value: Any) -> Prompt:
    try:
        return read_mixed(value)
    except ValueError as error:
        raise invalid(str(error)) from error


def _read_part(item: Any) -> str | int:
    if isinstance(item, str):
        return item
    if isinstance(item, int | float):
        return int(item)
    raise ValueError(wrong_type("number", item))


def _is_integer(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)

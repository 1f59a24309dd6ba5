"""POST /infill: what stands before and after a gap, as the prompt that a model fills it from.

Only the layout is here; from the prompt on an infill is a native completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.responses import Response

from gateway.backend import Backend
from gateway.completion import complete
from gateway.connection import Connection
from gateway.errors import invalid, not_supported, server_fault
from gateway.exchange import Exchange
from gateway.facts import Facts
from gateway.fields import members_of
from gateway.native import NativeDialect
from gateway.off_loop import off_loop
from gateway.options import GatewayOptions
from gateway.prompts import MAX_PROMPTS, Prompt, check_vocabulary, read_mixed, tokenize_all
from gateway.sse import EventStream

# llama.cpp's words: a repository's name, the file that has the gap, and what stands before a
# chunk of a model without a token for it.
_REPOSITORY = "myproject\n"
_GAP_FILE = "filename\n"
_DEFAULT_FILE = "tmp"
_SNIPPET = "\n\n--- snippet ---\n\n"
_EXTRA = '"input_extra" must be an array of {"filename": string, "text": string}'
_EXTRA_TEXT = 'extra_context chunk must contain a "text" field with a string value'
_EXTRA_NAME = 'extra_context chunk\'s "filename" field must be a string'


@dataclass(frozen=True)
class Layout:
    """How much of each part is kept, and in which order the halves stand.

    `batch_tokens` is the peer's logical batch, which the halves share 3 to 1; what the context
    holds beyond it is for the extra chunks. `swaps_halves` puts the suffix first.
    """

    batch_tokens: int
    context_tokens: int
    max_tokens: int
    swaps_halves: bool

    @property
    def prefix_tokens(self) -> int:
        """The most tokens of the prefix, its end kept."""
        return 3 * (self.batch_tokens // 4)

    def suffix_tokens(self, prompt_tokens: int) -> int:
        """The most tokens of the suffix, its beginning kept."""
        return max(0, self.batch_tokens // 4 - (2 + prompt_tokens))

    @property
    def extra_tokens(self) -> int:
        """The most tokens of the extra chunks, their end kept."""
        return max(0, self.context_tokens - self.batch_tokens - 2 * self.max_tokens)


@dataclass(frozen=True)
class _Parts:
    """The texts of a body; `pieces` are those of the extra chunks, a number being a token."""

    prefix: Prompt
    suffix: Prompt
    prompt: Prompt
    pieces: tuple[str | int, ...]


async def infill(exchange: Exchange) -> Response | EventStream:
    """Serves an infill.

    Source: format_prompt_infill and the route of llama-server.

    Raises:
        ApiError: the vocabulary lacks a token for it, or the body is refused.
    """
    connection, backend = exchange.connection, exchange.backend
    missing = missing_tokens(backend.facts)
    if missing:
        await connection.body()
        raise not_supported(f"Infill is not supported by this model: {missing}")
    body = members_of(await connection.json())
    parts = await off_loop(lambda: _read(body, backend.facts), weight=connection.body_bytes)
    layout = _layout(exchange.options, backend.facts)
    prompt = await connection.while_connected(_tokens(connection, backend, parts, layout))
    dialect = NativeDialect(backend.facts.name)
    return await complete(connection, backend, {**body, "prompt": prompt}, dialect)


def missing_tokens(facts: Facts) -> str:
    """Names the fill-in-the-middle tokens that the vocabulary lacks, in the peer's words."""
    tokens = facts.model.special_tokens
    present = {
        "prefix": tokens.HasField("fim_pre"),
        "suffix": tokens.HasField("fim_suf"),
        "middle": tokens.HasField("fim_mid"),
    }
    return "".join(
        f"{name} token is missing. " for name, is_there in present.items() if not is_there
    )


def _layout(options: GatewayOptions, facts: Facts) -> Layout:
    return Layout(
        batch_tokens=options.batch_tokens,
        context_tokens=facts.info.slot_context_tokens,
        max_tokens=facts.defaults.server_n_predict,
        swaps_halves=options.spm_infill,
    )


def _read(body: Mapping[str, Any], facts: Facts) -> _Parts:
    pieces = _read_extra(body.get("input_extra", []), facts)
    prompt = body.get("prompt")
    return _Parts(
        prefix=_read_half(body, "input_prefix", facts),
        suffix=_read_half(body, "input_suffix", facts),
        # The peer ignores a prompt that is no text.
        prompt=Prompt((prompt,)) if isinstance(prompt, str) and prompt else Prompt(()),
        pieces=pieces,
    )


def _read_half(body: Mapping[str, Any], name: str, facts: Facts) -> Prompt:
    if name not in body:
        raise server_fault(f"key '{name}' not found")
    try:
        half = read_mixed(body[name])
    except ValueError as error:
        raise server_fault(str(error)) from error
    check_vocabulary([half], facts.model.vocab_size)
    return half


def _read_extra(value: Any, facts: Facts) -> tuple[str | int, ...]:
    if not isinstance(value, list):
        raise invalid(_EXTRA)
    chunks = cast("list[Any]", value)
    if len(chunks) > MAX_PROMPTS:
        raise invalid(f'"input_extra" has {len(chunks)} chunks, the limit is {MAX_PROMPTS}')
    tokens = facts.model.special_tokens
    separator = tokens.fim_sep.id if tokens.HasField("fim_sep") else None
    pieces: list[str | int] = []
    if tokens.HasField("fim_rep"):
        pieces += [tokens.fim_rep.id, _REPOSITORY]
    for chunk in chunks:
        text, name = _read_chunk(chunk)
        pieces += [_SNIPPET] if separator is None else [separator, f"{name}\n"]
        pieces.append(text)
    if separator is not None:
        pieces += [separator, _GAP_FILE]
    return tuple(pieces)


def _read_chunk(chunk: Any) -> tuple[str, str]:
    members: Mapping[str, Any] = (
        cast("Mapping[str, Any]", chunk) if isinstance(chunk, Mapping) else {}
    )
    text, name = members.get("text"), members.get("filename", _DEFAULT_FILE)
    if not isinstance(text, str):
        raise invalid(_EXTRA_TEXT)
    if not isinstance(name, str):
        raise invalid(_EXTRA_NAME)
    return text, name


async def _tokens(
    connection: Connection, backend: Backend, parts: _Parts, layout: Layout
) -> list[int]:
    # Each piece is tokenised alone: a text of SPM vocabularies begins with a space of its own.
    prompts = [parts.prefix, parts.suffix, *(Prompt((piece,)) for piece in parts.pieces)]
    prefix, suffix, *extra = await tokenize_all(
        backend, prompts, add_special=False, parse_special=False
    )
    (prompt,) = await tokenize_all(backend, [parts.prompt], add_special=False)
    texts = (prefix, suffix, prompt)
    return await off_loop(
        lambda: _laid_out(backend.facts, layout, texts, extra), weight=connection.body_bytes
    )


def _laid_out(
    facts: Facts,
    layout: Layout,
    texts: tuple[Sequence[int], ...],
    pieces: Sequence[Sequence[int]],
) -> list[int]:
    prefix, suffix, prompt = texts
    extra = [token for piece in pieces for token in piece]
    special = facts.model.special_tokens
    taken = min(len(prefix), layout.prefix_tokens)
    before = [special.fim_pre.id, *prefix[len(prefix) - taken :], *prompt]
    after = [special.fim_suf.id, *suffix[: layout.suffix_tokens(len(prompt))]]
    first, second = (after, before) if layout.swaps_halves else (before, after)
    bos = [special.bos.id] if facts.model.add_bos and special.HasField("bos") else []
    kept = extra[len(extra) - min(len(extra), layout.extra_tokens) :]
    return [*kept, *bos, *first, *second, special.fim_mid.id]

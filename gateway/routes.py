"""Every route by dialect: what serves it, under which names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from starlette.responses import Response

from gateway import adapter_routes, chat_routes, disabled, metrics, ops, slots, tokens
from gateway.completion import complete
from gateway.cors_proxy import cors_proxy
from gateway.embeddings import embed, embed_natively
from gateway.errors import invalid, wrong_type
from gateway.exchange import Exchange, Handler
from gateway.fields import lenient_flag
from gateway.infill import infill
from gateway.models import load_model
from gateway.native import NativeDialect
from gateway.openai_completions import CompletionsDialect
from gateway.pools import get_pools, rebuild_pools
from gateway.rerank import rerank
from gateway.sse import EventStream
from gateway.tools import call_tool, list_tools

_AUDIO = "The current model does not support audio input."

RouteRow = tuple[str, Sequence[str], Handler]


async def native_completion(exchange: Exchange) -> Response | EventStream:
    """POST /completion."""
    body = _object(await exchange.connection.json())
    dialect = NativeDialect(exchange.backend.facts.name)
    return await complete(exchange.connection, exchange.backend, body, dialect)


async def openai_completion(exchange: Exchange) -> Response | EventStream:
    """POST /v1/completions."""
    body = _object(await exchange.connection.json())
    is_verbose = lenient_flag(body.get("verbose"), exchange.options.is_verbose)
    dialect = CompletionsDialect(exchange.backend.facts, is_verbose=is_verbose)
    return await complete(exchange.connection, exchange.backend, body, dialect)


# What the service lets wait for the next model too, while it changes to it.
WAITING: frozenset[Handler] = frozenset(
    {
        native_completion,
        openai_completion,
        infill,
        chat_routes.chat_completions,
        chat_routes.responses,
        chat_routes.messages,
        embed,
        embed_natively,
        rerank,
        tokens.tokenize,
        tokens.detokenize,
        tokens.apply_template,
        tokens.count_chat_tokens,
        tokens.count_response_tokens,
        tokens.count_message_tokens,
    }
)


def route_table() -> list[RouteRow]:
    """(method, paths, handler), fresh for each application because metrics keep a memory."""
    return [
        # Native.
        ("POST", ("/completion", "/completions"), native_completion),
        ("POST", ("/tokenize",), tokens.tokenize),
        ("POST", ("/detokenize",), tokens.detokenize),
        ("POST", ("/apply-template",), tokens.apply_template),
        ("POST", ("/infill",), infill),
        ("POST", ("/embedding", "/embeddings"), embed_natively),
        # OpenAI.
        ("POST", ("/v1/completions",), openai_completion),
        ("POST", _both("/chat/completions"), chat_routes.chat_completions),
        ("POST", _both("/chat/completions/input_tokens"), tokens.count_chat_tokens),
        (
            "POST",
            ("/v1/chat/completions/control",),
            disabled.refusing("not supported: reasoning control"),
        ),
        ("POST", _both("/responses"), chat_routes.responses),
        ("POST", _both("/responses/input_tokens"), tokens.count_response_tokens),
        ("POST", ("/v1/embeddings",), embed),
        ("POST", _both("/audio/transcriptions"), disabled.refusing(_AUDIO)),
        # Anthropic, Jina and TEI.
        ("POST", ("/v1/messages",), chat_routes.messages),
        ("POST", ("/v1/messages/count_tokens",), tokens.count_message_tokens),
        ("POST", (*_both("/rerank"), *_both("/reranking")), rerank),
        # Slots and adapters.
        ("GET", ("/slots",), slots.list_slots),
        ("POST", ("/slots/{id_slot}",), slots.act_on_slot),
        ("GET", ("/lora-adapters",), adapter_routes.list_adapters),
        ("POST", ("/lora-adapters",), adapter_routes.set_adapter_scales),
        # Ours.
        ("GET", ("/pools",), get_pools),
        ("POST", ("/pools",), rebuild_pools),
        ("POST", ("/admin/models/load",), load_model),
        # Operations.
        ("GET", _both("/health"), ops.health),
        ("GET", _both("/models"), ops.list_models),
        ("GET", ("/props",), ops.get_props),
        ("POST", ("/props",), ops.set_props),
        ("GET", ("/metrics",), metrics.make_handler()),
        ("GET", ("/tools",), list_tools),
        ("POST", ("/tools",), call_tool),
        ("GET", ("/cors-proxy",), cors_proxy),
        ("POST", ("/cors-proxy",), cors_proxy),
    ]


def _both(path: str) -> tuple[str, str]:
    return path, f"/v1{path}"


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise invalid(wrong_type("object", body))
    return cast("dict[str, Any]", body)

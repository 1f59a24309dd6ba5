"""The routes that describe the server: health, models, properties."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvarts.v1 import model_pb2
from starlette.responses import Response

from gateway.connection import json_response
from gateway.errors import not_supported
from gateway.exchange import Exchange
from gateway.facts import Facts
from gateway.options import GatewayOptions
from gateway.peer_json import Json
from gateway.schema import CompletionParams
from gateway.service import answer
from gateway.settings import short_settings

_CAPABILITIES = (
    "object_arguments",
    "parallel_tool_calls",
    "preserve_reasoning",
    "reasoning_effort",
    "string_content",
    "system_role",
    "tool_calls",
    "tools",
    "typed_content",
)
# Only sampling follows the command line in the properties; the rest shows the peer's own defaults.
_NOT_SAMPLING = (
    "stream",
    "n_predict",
    "n_keep",
    "n_discard",
    "reasoning_format",
    "generation_prompt",
    "chat_format",
    "timings_per_token",
    "post_sampling_probs",
    "lora",
)


async def health(exchange: Exchange) -> Response:
    """GET /health; an unready service was answered by the gates."""
    del exchange
    return json_response({"status": "ok"})


async def list_models(exchange: Exchange) -> Response:
    """GET /v1/models."""
    return json_response(models_json(exchange.backend.facts, int(time.time())))


async def get_props(exchange: Exchange) -> Response:
    """GET /props; whether the service sleeps is asked now, the rest was at the start."""
    backend = exchange.backend
    request = model_pb2.GetServerInfoRequest()
    asked = backend.service.model.GetServerInfo(request, metadata=backend.metadata)
    is_asleep = (await answer(asked)).info.sleeping
    return json_response(props_json(backend.facts, exchange.options, is_asleep=is_asleep))


async def set_props(exchange: Exchange) -> Response:
    """POST /props; there is nothing that can be set."""
    if not exchange.options.has_props:
        raise not_supported(
            "This server does not support changing global properties. Start it with `--props`"
        )
    await exchange.connection.body()
    return json_response({"success": True})


def models_json(facts: Facts, now_s: int) -> Json:
    """The model card, in Ollama's form and in OpenAI's."""
    model = facts.model
    card: dict[str, Json] = {
        "name": facts.name,
        "model": facts.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    entry: dict[str, Json] = {
        "id": facts.name,
        "aliases": facts.aliases,
        "tags": facts.tags,
        "object": "model",
        "created": now_s,
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": max(0, model.vocab_type - 1),
            "n_vocab": model.vocab_size,
            "n_ctx": facts.info.slot_context_tokens,
            "n_ctx_train": model.context_train_tokens,
            "n_embd": model.embedding_size,
            "n_params": model.num_params,
            "size": model.size_bytes,
            "ftype": model.ftype,
        },
    }
    return {"models": [card], "object": "list", "data": [entry]}


def props_json(facts: Facts, options: GatewayOptions, *, is_asleep: bool) -> Json:
    """The server's properties."""
    model, info = facts.model, facts.info
    template = model.chat_template
    props: dict[str, Json] = {
        "default_generation_settings": {
            "params": short_settings(_shown_defaults(facts.defaults)),
            "n_ctx": info.slot_context_tokens,
        },
        "total_slots": info.num_slots,
        "model_alias": facts.name,
        "model_ftype": model.ftype,
        "model_path": model.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": facts.media_marker,
        "endpoint_slots": options.has_slots,
        "endpoint_props": options.has_props,
        "endpoint_metrics": options.has_metrics,
        "ui": options.has_ui,
        "ui_settings": {},
        "chat_template": template.source,
        "chat_template_caps": _capabilities(template.capabilities),
        "bos_token": model.special_tokens.bos.text,
        "eos_token": model.special_tokens.eos.text,
        "build_info": info.build_info,
        "is_sleeping": is_asleep,
        "cors_proxy_enabled": options.has_cors_proxy,
    }
    if options.use_jinja and template.tool_use_source:
        props["chat_template_tool_use"] = template.tool_use_source
    return props


def _shown_defaults(defaults: CompletionParams) -> CompletionParams:
    own: dict[str, Any] = {name: getattr(CompletionParams(), name) for name in _NOT_SAMPLING}
    return dataclasses.replace(defaults, **(own | {"reasoning_format": "none"}))


def _capabilities(capabilities: model_pb2.ChatTemplateCapabilities) -> dict[str, Json]:
    return {f"supports_{name}": bool(getattr(capabilities, name)) for name in _CAPABILITIES}

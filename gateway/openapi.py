"""GET /openapi.json: every route in OpenAPI's words, from the tables that serve them.

Bodies say what is honoured. What llama-server takes besides and passes over is not listed: no
schema of a body forbids further members. Knows no answer's members, which are the peer's contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from starlette.responses import Response

from gateway import fields
from gateway.connection import json_response
from gateway.exchange import Exchange, Handler
from gateway.samplers import SamplerNames
from gateway.schema import FIELDS, REASONING_FORMATS

Schema = dict[str, Any]
RouteRow = tuple[str, Sequence[str], Handler]

_ANY: Schema = {}
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_INTEGER: Schema = {"type": "integer"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": fields.INT32_MAX}
_PROMPT: Schema = {
    "description": "A text, token ids, both mixed, or a list of such prompts.",
    "anyOf": [_TEXT, {"type": "array", "minItems": 1}, _OBJECT],
}
_MESSAGES: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, _OBJECTS]}},
        "required": ["role"],
    },
}
# Of a kind that has no bounds of its own; the others are in `_of_kind`.
_PLAIN: Mapping[type, Schema] = {
    fields.Flag: _FLAG,
    fields.Unsigned32: _INTEGER,
    fields.Text: _TEXT,
    fields.LenientText: _TEXT,
    fields.LenientTexts: _TEXTS,
    fields.Texts: {"anyOf": [_TEXT, _TEXTS]},
    fields.Stops: {"anyOf": [_TEXT, _TEXTS]},
    fields.Breakers: {**_TEXTS, "minItems": 1},
    SamplerNames: {"anyOf": [_TEXT, _TEXTS]},
    fields.Triggers: _OBJECTS,
    fields.Adapters: {
        "type": "array",
        "items": {"type": "object", "properties": {"id": _INTEGER, "scale": {"type": "number"}}},
    },
    fields.Bias: {"anyOf": [_OBJECT, {"type": "array"}]},
}


def _of_kind(kind: fields.Kind) -> Schema:
    """Hard bounds are bounds; what is clamped to soft ones is told in words."""
    if isinstance(kind, fields.Integer | fields.Float32):
        name = "integer" if isinstance(kind, fields.Integer) else "number"
        if kind.is_hard:
            return {"type": name, "minimum": kind.low, "maximum": kind.high}
        return {"type": name, "description": f"Clamped to [{kind.low:g}, {kind.high:g}]."}
    # The one kind that is not listed names the formats of reasoning.
    return _PLAIN.get(type(kind), {"enum": list(REASONING_FORMATS)})


def _body(properties: Schema, *required: str) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return schema | ({"required": list(required)} if required else {})


_SAMPLING: Schema = {
    name: _of_kind(field.kind) for field in FIELDS for name in field.names or (field.parameter,)
} | {"grammar": _TEXT, "json_schema": _ANY, "id_slot": _INTEGER, "n_predict": _INTEGER}
_COMPLETION = _body({"prompt": _PROMPT, **_SAMPLING}, "prompt")
_CHAT_MEMBERS: Schema = {
    "messages": _MESSAGES,
    "tools": _OBJECTS,
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "parallel_tool_calls": _FLAG,
    "response_format": _OBJECT,
    "chat_template_kwargs": _OBJECT,
    "add_generation_prompt": _FLAG,
    # Whether the alternatives of a token are told, unlike in a completion.
    "logprobs": _FLAG,
    "top_logprobs": _INTEGER,
}
_CHAT = _body(_SAMPLING | _CHAT_MEMBERS, "messages")
_RESPONSES = _body(
    {
        "input": {"anyOf": [_TEXT, _OBJECTS]},
        "instructions": _TEXT,
        "tools": _OBJECTS,
        "max_output_tokens": _INTEGER,
        "reasoning": _OBJECT,
        "stream": _FLAG,
    },
    "input",
)
_ANTHROPIC = _body(
    {
        "messages": _MESSAGES,
        "system": {"anyOf": [_TEXT, _OBJECTS]},
        "max_tokens": _INTEGER,
        "stop_sequences": _TEXTS,
        "tools": _OBJECTS,
        "tool_choice": _OBJECT,
        "thinking": _OBJECT,
        "temperature": {"type": "number"},
        "top_p": {"type": "number"},
        "top_k": _INTEGER,
        "stream": _FLAG,
    },
    "messages",
)
_INPUT: Schema = {"input": _PROMPT, "content": _PROMPT, "embd_normalize": _INTEGER}
_EMBEDDING = _body({**_INPUT, "encoding_format": {"enum": ["float", "base64"]}})
_RERANK = _body(
    {
        "query": _TEXT,
        "documents": _TEXTS,
        "texts": _TEXTS,
        "top_n": _INTEGER,
        "return_text": _FLAG,
    },
    "query",
)
_BODIES: Mapping[str, Schema] = {
    "/completion": _COMPLETION,
    "/completions": _COMPLETION,
    "/v1/completions": _COMPLETION,
    "/infill": _body(
        {
            "input_prefix": _TEXT,
            "input_suffix": _TEXT,
            "input_extra": _OBJECTS,
            **_SAMPLING,
            "prompt": _TEXT,
        },
        "input_prefix",
        "input_suffix",
    ),
    "/chat/completions": _CHAT,
    "/apply-template": _CHAT,
    "/responses": _RESPONSES,
    "/messages": _ANTHROPIC,
    "/embedding": _EMBEDDING,
    "/embeddings": _EMBEDDING,
    "/rerank": _RERANK,
    "/reranking": _RERANK,
    "/tokenize": _body(
        {"content": _PROMPT, "add_special": _FLAG, "parse_special": _FLAG, "with_pieces": _FLAG}
    ),
    "/detokenize": _body({"tokens": {"type": "array", "items": _TOKEN}}),
    "/slots/{id_slot}": _body({"filename": _TEXT, "prompt": _PROMPT}),
    "/lora-adapters": _of_kind(fields.Adapters()),
    "/tools": _body({"tool": _TEXT, "params": _OBJECT, "stream": _FLAG}, "tool"),
}
_COUNTS = ("/input_tokens", "/count_tokens")
_SLOT: Sequence[Schema] = (
    {"name": "id_slot", "in": "path", "required": True, "schema": _TEXT},
    {
        "name": "action",
        "in": "query",
        "required": True,
        "schema": {"enum": ["save", "restore", "erase"]},
    },
)
_URL: Schema = {"name": "url", "in": "query", "required": True, "schema": _TEXT}
_JSON = "application/json"
_PLAIN_TEXT = frozenset({"/metrics"})


def document(table: Iterable[RouteRow], prefix: str) -> Schema:
    """The document of the routes of `table` behind `prefix`."""
    paths: dict[str, Schema] = {}
    for method, names, _ in table:
        for name in names:
            paths.setdefault(f"{prefix}{name}", {})[method.lower()] = _operation(method, name)
    error = _body({"error": _body({"message": _TEXT, "type": _TEXT}, "message", "type")}, "error")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvarts", "version": version("kvarts")},
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def openapi_route(table: Sequence[RouteRow], prefix: str) -> RouteRow:
    """The route that shows the document of `table`, and of itself."""

    async def show(exchange: Exchange) -> Response:
        del exchange
        return json_response(shown)

    row: RouteRow = ("GET", ("/openapi.json",), show)
    shown = document([*table, row], prefix)
    return row


def _operation(method: str, name: str) -> Schema:
    found: Schema = {"text/plain": {}} if name in _PLAIN_TEXT else {_JSON: {}}
    body = _body_of(name) if method == "POST" else None
    if body is not None and "stream" in body.get("properties", {}):
        found["text/event-stream"] = {}
    operation: Schema = {
        "responses": {
            "200": {"description": "The answer.", "content": found},
            "default": {
                "description": "A refusal; x-kvarts-reason tells the cause in one word.",
                "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        }
    }
    if name not in ("/health", "/v1/health"):
        operation["security"] = [{}, {"key": []}]
    if "{" in name:
        operation["parameters"] = list(_SLOT)
    elif name == "/cors-proxy":
        operation["parameters"] = [_URL]
        operation["responses"]["200"]["content"] = {"*/*": {}}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return operation


def _body_of(name: str) -> Schema | None:
    """By the whole path, else by what stands behind the version; a count's is what is counted."""
    for ending in _COUNTS:
        name = name.removesuffix(ending)
    return _BODIES.get(name) or _BODIES.get(name.removeprefix("/v1"))

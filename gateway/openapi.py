"""GET /openapi.json: every route in OpenAPI's words, from the tables that serve them.

Bodies say what is honoured. What llama-server takes besides and passes over is not listed: no
schema of a body forbids further members, and what it reads as not given has no type. Knows no
answer's members, which are the peer's contract, but every status that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from starlette.responses import Response

from gateway import fields
from gateway.connection import json_response
from gateway.errors import ErrorKind
from gateway.exchange import Exchange, Handler
from gateway.gates import PUBLIC
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
_PARTS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
    },
}
_MESSAGES: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, _PARTS]}},
        "required": ["role"],
        "anyOf": [
            {"required": ["content"]},
            {"properties": {"role": {"const": "assistant"}}, "required": ["tool_calls"]},
        ],
    },
}
# What the peer's reading of a boolean narrower than 64 bits takes for a number besides.
_NUMBER: Schema = {"type": ["number", "boolean"]}


def _lenient(what: str) -> Schema:
    return {"description": f"{what}; anything else reads as not given."}


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
        "items": {
            "type": "object",
            "properties": {"id": _lenient("An integer"), "scale": _lenient("A number")},
        },
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
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
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
        "input": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"role": _TEXT, "type": _TEXT, "content": _ANY},
                        "anyOf": [{"required": ["role", "content"]}, {"required": ["type"]}],
                    },
                },
            ]
        },
        "instructions": _TEXT,
        "tools": _OBJECTS,
        "max_output_tokens": _INTEGER,
        "reasoning": _OBJECT,
        "stream": _lenient("A boolean"),
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
        "stream": _lenient("A boolean"),
    },
    "messages",
)
_EMBEDDING = _body(
    {
        "input": _PROMPT,
        "content": _PROMPT,
        "embd_normalize": _NUMBER,
        "encoding_format": {"enum": ["float", "base64"]},
    }
) | {"anyOf": [{"required": ["input"]}, {"required": ["content"]}]}
_RERANK = _body(
    {
        "query": _TEXT,
        "documents": _TEXTS,
        "texts": _TEXTS,
        "top_n": _lenient("An integer"),
        "return_text": _lenient("A boolean"),
    },
    "query",
)
# See `gateway.slots.is_filename`.
_FILENAME: Schema = {
    "type": "string",
    "maxLength": 255,
    "pattern": r"^[A-Za-z0-9_-](\.?[A-Za-z0-9_-])*$",
}
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
        {
            "content": _PROMPT,
            "add_special": _lenient("A boolean"),
            "parse_special": _lenient("A boolean"),
            "with_pieces": _lenient("A boolean"),
        }
    ),
    "/detokenize": _body({"tokens": {"type": "array", "items": _ANY}}),
    "/slots/{id_slot}": _body({"filename": _FILENAME, "prompt": _PROMPT}),
    "/lora-adapters": _of_kind(fields.Adapters()),
    "/tools": _body({"tool": _TEXT, "params": _OBJECT, "stream": _lenient("A boolean")}, "tool"),
}
_COUNTS = ("/input_tokens", "/count_tokens")
_SLOT: Sequence[Schema] = (
    {
        "name": "id_slot",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^-?[0-9]{1,9}$"},
    },
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
_REFUSED: Schema = {
    "description": "A refusal; x-kvarts-reason tells the cause in one word.",
    "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
}
# What is the client's fault is some 4XX, but as with the peer no JSON is 500; a 5XX of another
# number is a bug.
_REFUSALS: Schema = {"4XX": _REFUSED} | {
    str(kind.status): _REFUSED for kind in ErrorKind if kind.status >= 500
}


def document(table: Iterable[RouteRow], prefix: str, *, needs_key: bool) -> Schema:
    """The document of the routes of `table` behind `prefix`."""
    paths: dict[str, Schema] = {}
    for method, names, _ in table:
        for name in names:
            path = f"{prefix}{name}"
            operation = _operation(method, name)
            # Compared with the whole path, as `gateway.gates` does.
            if needs_key and path not in PUBLIC:
                operation["security"] = [{"key": []}]
            paths.setdefault(path, {})[method.lower()] = operation
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


def openapi_route(
    table: Sequence[RouteRow], prefix: str, needs_key: Callable[[], bool]
) -> RouteRow:
    """The route that shows the document of `table`, and of itself; keys may come and go."""

    async def show(exchange: Exchange) -> Response:
        del exchange
        return json_response(document([*table, row], prefix, needs_key=needs_key()))

    row: RouteRow = ("GET", ("/openapi.json",), show)
    return row


def _operation(method: str, name: str) -> Schema:
    found: Schema = {"text/plain": {}} if name in _PLAIN_TEXT else {_JSON: {}}
    body = _body_of(name) if method == "POST" else None
    if body is not None and "stream" in body.get("properties", {}):
        found["text/event-stream"] = {}
    operation: Schema = {
        "responses": {"200": {"description": "The answer.", "content": found}} | _REFUSALS
    }
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

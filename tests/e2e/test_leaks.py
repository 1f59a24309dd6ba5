"""What clients send is told to nobody else: not by logs, lists, metrics, traces or others' errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message
from kvarts.v1 import (
    common_pb2,
    embedding_pb2,
    generation_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
    tokenization_pb2,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.adapters import TinyAdapter, write_adapter
from tests.contract.calls import RPCS
from tests.e2e.conftest import Start, healthy, http_client

pytestmark = pytest.mark.slow

_KINDS = (
    *("prompt", "system", "answer", "key", "schema", "property", "grammar", "stop", "tool"),
    *("argument", "kwarg", "name", "adapter", "file", "header"),
)
# Which model is wanted is an operator's word, and the log's.
_MODEL = "another-model"
TOLD = {kind: f"canary-{kind}-5f3a" for kind in _KINDS}
_ATTN_Q = "blk.0.attn_q.weight"


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OpenTelemetry collector that keeps all that it is sent."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    async def Export(self, request: Any, context: Any) -> Any:
        self.spans.append(str(request))
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def _collecting() -> AsyncGenerator[tuple[_Collector, str]]:
    collector, door = _Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, door)
    port = door.add_insecure_port("127.0.0.1:0")
    await door.start()
    yield collector, f"http://127.0.0.1:{port}"
    await door.stop(1)


@dataclass
class _Seen:
    """Answers that others may read, and the errors, each with what its caller had named."""

    lists: list[str] = field(default_factory=list[str])
    errors: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


_SCHEMA = {"type": "object", "properties": {TOLD["property"]: {"const": TOLD["schema"]}}}
_MESSAGES = [
    {"role": "system", "content": TOLD["system"]},
    {"role": "user", "content": TOLD["prompt"]},
    {"role": "assistant", "content": TOLD["answer"]},
    {"role": "user", "content": TOLD["prompt"]},
]
_TOOL = {
    "type": "function",
    "function": {
        "name": TOLD["tool"],
        "parameters": {"type": "object", "properties": {TOLD["argument"]: {"type": "string"}}},
    },
}
_CHAT: dict[str, Any] = {
    "messages": _MESSAGES,
    "max_tokens": 2,
    "chat_template_kwargs": {TOLD["kwarg"]: TOLD["kwarg"]},
}
_TALK = {"messages": _MESSAGES[1:], "max_tokens": 2, "system": TOLD["system"]}
_PROMPT: dict[str, Any] = {"prompt": TOLD["prompt"], "n_predict": 2}
_GRAMMAR = f'root ::= "{TOLD["grammar"]}"'

HTTP: list[tuple[str, dict[str, Any]]] = [
    ("/completion", _PROMPT | {"stop": [TOLD["stop"]], "n_probs": 3, "stream": True}),
    ("/completion", _PROMPT | {"json_schema": _SCHEMA}),
    ("/completion", _PROMPT | {"grammar": _GRAMMAR}),
    ("/v1/completions", _PROMPT | {"stop": TOLD["stop"]}),
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", _CHAT | {"tools": [_TOOL]}),
    ("/v1/chat/completions", _CHAT | {"response_format": {"type": "json_object", "schema": {}}}),
    ("/v1/chat/completions/input_tokens", _CHAT),
    ("/v1/responses", {"input": TOLD["prompt"], "instructions": TOLD["system"]}),
    ("/v1/messages", _TALK),
    ("/v1/messages/count_tokens", _TALK),
    ("/tokenize", {"content": TOLD["prompt"]}),
    ("/apply-template", {"messages": _MESSAGES}),
    ("/slots/0?action=save", {"filename": TOLD["name"], "prompt": TOLD["prompt"]}),
    ("/slots/0?action=restore", {"filename": TOLD["name"]}),
    ("/slots/0?action=erase", {}),
    ("/lora-adapters", {}),
]
# With the kind that the caller names and that is wrong: only that may come back.
HTTP_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/slots/0?action=restore", {"filename": f"{TOLD['name']}-none"}, "name"),
    ("/slots/0?action=save", {"filename": f"../{TOLD['name']}"}, "name"),
    ("/completion", {"prompt": TOLD["prompt"] * 3000}, ""),
    ("/completion", _PROMPT | {"grammar": f"root ::= {TOLD['grammar']}"}, "grammar"),
    ("/completion", _PROMPT | {"json_schema": {"type": TOLD["schema"]}}, "schema"),
    ("/completion", _PROMPT | {"n_predict": "many"}, ""),
    ("/v1/chat/completions", {"messages": TOLD["prompt"]}, ""),
    # The peer's words quote a message without a role to who sent it.
    ("/v1/chat/completions", {"messages": [{"content": TOLD["prompt"]}]}, "prompt"),
    ("/embedding", {"content": TOLD["prompt"]}, ""),
    ("/rerank", {"query": TOLD["prompt"], "documents": [TOLD["answer"]]}, ""),
    ("/infill", {"input_prefix": TOLD["prompt"], "input_suffix": TOLD["answer"]}, ""),
    ("/admin/models/load", {"path": f"{_MODEL}.gguf"}, ""),
    ("/admin/models/load", {"path": f"../{_MODEL}"}, ""),
]


def _chat() -> common_pb2.ChatPrompt:
    return common_pb2.ChatPrompt(
        messages=[common_pb2.ChatMessage(role="user", content=TOLD["prompt"])],
        tools=[common_pb2.Tool(name=TOLD["tool"], parameters_json='{"type":"object"}')],
        template_kwargs_json=json.dumps({TOLD["kwarg"]: TOLD["kwarg"]}),
    )


# Each RPC; with the kind that is wrong where it is refused, else None. In this order.
RPC: list[tuple[str, Message, str | None]] = [
    ("Generate", generation_pb2.GenerateRequest(chat=_chat(), max_tokens=2), None),
    (
        "Generate",
        generation_pb2.GenerateRequest(text=TOLD["prompt"], stop=[TOLD["stop"]], max_tokens=1),
        None,
    ),
    (
        "Generate",
        generation_pb2.GenerateRequest(text=TOLD["prompt"], grammar=f"root ::= {TOLD['grammar']}"),
        "grammar",
    ),
    ("Generate", generation_pb2.GenerateRequest(text=TOLD["prompt"], max_tokens=2**31), ""),
    ("Tokenize", tokenization_pb2.TokenizeRequest(text=TOLD["prompt"]), None),
    ("Detokenize", tokenization_pb2.DetokenizeRequest(token_ids=[5, 6]), None),
    ("ApplyChatTemplate", tokenization_pb2.ApplyChatTemplateRequest(chat=_chat()), None),
    (
        "ConvertJsonSchema",
        tokenization_pb2.ConvertJsonSchemaRequest(json_schema=json.dumps(_SCHEMA)),
        None,
    ),
    (
        "ConvertJsonSchema",
        tokenization_pb2.ConvertJsonSchemaRequest(json_schema=f'{{"type":"{TOLD["schema"]}"}}'),
        "schema",
    ),
    (
        "Embed",
        embedding_pb2.EmbedRequest(inputs=[embedding_pb2.EmbedInput(text=TOLD["prompt"])]),
        "",
    ),
    (
        "SaveSlot",
        slot_pb2.SaveSlotRequest(slot_id=1, filename=f"{TOLD['name']}-2", text=TOLD["prompt"]),
        None,
    ),
    ("RestoreSlot", slot_pb2.RestoreSlotRequest(slot_id=2, filename=f"{TOLD['name']}-2"), None),
    ("RestoreSlot", slot_pb2.RestoreSlotRequest(slot_id=2, filename=f"{TOLD['name']}-3"), "name"),
    ("EraseSlot", slot_pb2.EraseSlotRequest(slot_id=1), None),
    ("ListSlotFiles", slot_pb2.ListSlotFilesRequest(), None),
    ("DeleteSlotFile", slot_pb2.DeleteSlotFileRequest(filename=f"{TOLD['name']}-2"), None),
    ("DeleteSlotFile", slot_pb2.DeleteSlotFileRequest(filename=f"{TOLD['name']}-3"), "name"),
    (
        "LoadAdapter",
        lora_pb2.LoadAdapterRequest(name=TOLD["adapter"], path=f"{TOLD['file']}.gguf"),
        None,
    ),
    (
        "LoadAdapter",
        lora_pb2.LoadAdapterRequest(name=TOLD["adapter"], path=f"{TOLD['file']}.none"),
        "file",
    ),
    ("LoadAdapter", lora_pb2.LoadAdapterRequest(name="other", path=f"{TOLD['file']}.bad"), "file"),
    ("LoadAdapter", lora_pb2.LoadAdapterRequest(name="o", path=f"../{TOLD['file']}"), "file"),
    ("ListAdapters", lora_pb2.ListAdaptersRequest(), None),
    (
        "SetAdapterScales",
        lora_pb2.SetAdapterScalesRequest(scales=common_pb2.AdapterScales()),
        None,
    ),
    ("Generate", generation_pb2.GenerateRequest(text=TOLD["prompt"], max_tokens=2), None),
    ("UnloadAdapter", lora_pb2.UnloadAdapterRequest(adapter_id=99), ""),
    ("UnloadAdapter", lora_pb2.UnloadAdapterRequest(adapter_id=0), None),
    ("LoadModel", model_pb2.LoadModelRequest(path=f"{_MODEL}.gguf"), ""),
    ("GetPools", rebuild_pb2.GetPoolsRequest(), None),
    (
        "Rebuild",
        rebuild_pb2.RebuildRequest(target=rebuild_pb2.PoolSizes(kv_pages=1), validate_only=True),
        "",
    ),
]
# What others may read too.
LISTS: list[tuple[str, Message]] = [
    ("ListSlots", slot_pb2.ListSlotsRequest()),
    ("GetServerInfo", model_pb2.GetServerInfoRequest()),
    ("GetModel", model_pb2.GetModelRequest()),
    ("GetMetrics", model_pb2.GetMetricsRequest()),
    ("WatchModel", model_pb2.WatchModelRequest()),
]


async def _over_http(session: httpx.AsyncClient, seen: _Seen) -> None:
    for path, body in HTTP:
        content: Any = [] if path == "/lora-adapters" else body
        answer = await session.post(path, json=content, headers={"x-a": TOLD["header"]})
        assert answer.status_code == 200, (path, answer.text)
    for path, body, kind in HTTP_REFUSED:
        answer = await session.post(path, json=body)
        assert answer.status_code >= 400, (path, answer.text)
        seen.errors.append((kind, f"{answer.text}{answer.headers}"))
    for path in (
        "/slots",
        "/metrics",
        "/props",
        "/v1/models",
        "/health",
        "/pools",
        "/openapi.json",
    ):
        answer = await session.get(path)
        assert answer.status_code == 200, path
        seen.lists.append(answer.text)


def _error_text(error: grpc.aio.AioRpcError) -> str:
    trailers = [str(value) for _, value in error.trailing_metadata() or ()]
    return f"{error.details()}{trailers}"


async def _over_grpc(channel: grpc.aio.Channel, seen: _Seen) -> None:
    by_name = {rpc.name: rpc for rpc in RPCS}
    assert {name for name, *_ in (*RPC, *LISTS)} == set(by_name), "an RPC is not called"
    metadata = (("authorization", f"Bearer {TOLD['key']}"), ("x-a", TOLD["header"]))
    for name, request, kind in RPC:
        error = await by_name[name].call(channel, request.SerializeToString(), metadata)
        assert (error is None) == (kind is None), (name, request, error)
        if error is not None:
            seen.errors.append((kind or "", _error_text(error)))
    for name, request in LISTS:
        rpc = by_name[name]
        untyped: Any = channel
        if rpc.descriptor.server_streaming:
            call = untyped.unary_stream(rpc.path)(request.SerializeToString(), metadata=metadata)
            seen.lists.append(str(await call.read()))
            call.cancel()
        else:
            call = untyped.unary_unary(rpc.path)(request.SerializeToString(), metadata=metadata)
            seen.lists.append(str(await call))


async def test_nothing_that_clients_send_is_told_to_others(start: Start, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("saved-slots", "adapters", "models")}
    for folder in folders.values():
        folder.mkdir()
    shapes = {_ATTN_Q: (64, 64)}
    path = folders["adapters"] / f"{TOLD['file']}.gguf"
    write_adapter(path, TinyAdapter(), shapes, tuple(shapes))
    path.with_suffix(".bad").write_bytes(path.read_bytes()[:100])
    flags = ("-lv", "10", "--metrics", "--api-key", TOLD["key"], "--grpc-port", "0")
    flags += ("--slot-save-path", str(folders["saved-slots"]))
    flags += ("--lora-dir", str(folders["adapters"]), "--model-dir", str(folders["models"]))
    seen = _Seen()
    async with _collecting() as (collector, endpoint):
        with start(*flags, "--otlp-endpoint", endpoint) as program:
            url = await asyncio.to_thread(program.ready().http_url)
            await healthy(url)
            async with grpc.aio.insecure_channel(program.grpc_address()) as channel:
                await _over_grpc(channel, seen)
            async with http_client(url, TOLD["key"]) as session:
                await _over_http(session, seen)
            async with http_client(url, f"{TOLD['key']}x") as stranger:
                seen.errors.append(("", (await stranger.get("/slots")).text))
            # When both processes have ended, all spans are there.
            program.process.terminate()
            assert await asyncio.to_thread(program.exit_status) == 0
        log = program.output.text()
    assert collector.spans
    assert "kvarts.v1.SlotService/SaveSlot" in str(collector.spans)
    for kind, secret in TOLD.items():
        lines = [line for line in log.splitlines() if secret in line]
        assert not lines, f"the {kind} is in the log: {lines[:3]}"
        assert not any(secret in text for text in seen.lists), f"the {kind} is in a list"
        assert not any(secret in span for span in collector.spans), f"the {kind} is in a trace"
        for named, text in seen.errors:
            assert named == kind or secret not in text, f"the {kind} is in an error: {text}"
    for _, text in seen.errors:
        assert str(tmp_path) not in text
        assert not any(word in text for word in ("Traceback", ".py", "/engine/", "/service/")), text

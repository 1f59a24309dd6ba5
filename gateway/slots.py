"""The routes around slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from kvarts.v1 import slot_pb2
from starlette.responses import Response

from gateway import peer_json
from gateway.connection import json_response
from gateway.errors import ApiError, ErrorKind, invalid, not_supported, server_fault, wrong_type
from gateway.exchange import Exchange
from gateway.facts import params_of
from gateway.fields import members_of
from gateway.peer_json import Json
from gateway.prompts import check_vocabulary, read_prompts, tokenize
from gateway.requests import wrap_slot_id
from gateway.rpc_errors import from_restore
from gateway.service import answer
from gateway.settings import short_settings
from gateway.timings import microseconds

_LEADING_INTEGER = re.compile(r"\s*([+-]?\d{1,10})")
_INT32_MAX = 2**31 - 1
# Narrower than the peer's rule: what only that takes is refused in its words.
_FILENAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,255}(?<!\.)")


async def list_slots(exchange: Exchange) -> Response:
    """GET /slots."""
    if not exchange.options.has_slots:
        raise not_supported("This server does not support slots endpoint. Start it with `--slots`")
    backend = exchange.backend
    request = slot_pb2.ListSlotsRequest()
    slots = (
        await answer(backend.service.slots.ListSlots(request, metadata=backend.metadata))
    ).slots
    wants_idle = bool(exchange.request.query_params.get("fail_on_no_slot"))
    if wants_idle and not any(slot.state == slot_pb2.SLOT_STATE_IDLE for slot in slots):
        raise ApiError(ErrorKind.UNAVAILABLE, "no slot available")
    return json_response([slot_json(slot) for slot in slots])


async def act_on_slot(exchange: Exchange) -> Response:
    """POST /slots/{id}?action=save|restore|erase."""
    if not exchange.backend.facts.info.features.slot_files:
        raise not_supported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    asked = _slot_id(exchange.request.path_params["id_slot"])
    action = exchange.request.query_params.get("action", "")
    if action not in _ACTIONS:
        raise invalid("Invalid action")
    return await _ACTIONS[action](exchange, asked)


def slot_json(slot: slot_pb2.Slot) -> Json:
    """A slot as the peer lists it; one never used has no task and no parameters."""
    is_busy = slot.state != slot_pb2.SLOT_STATE_IDLE
    members: dict[str, Json] = {
        "id": slot.id,
        "n_ctx": slot.context_tokens,
        "speculative": False,
        "is_processing": is_busy,
    }
    if not slot.HasField("task_id"):
        return members
    remaining = slot.remaining_tokens if slot.HasField("remaining_tokens") else -1
    return members | {
        "id_task": slot.task_id,
        "n_prompt_tokens": slot.held_tokens,
        "n_prompt_tokens_processed": slot.evaluated_tokens,
        "n_prompt_tokens_cache": slot.cached_tokens,
        "params": _params(slot),
        "next_token": [
            {
                "has_next_token": is_busy,
                "has_new_line": slot.has_new_line,
                "n_remain": remaining,
                "n_decoded": slot.decoded_tokens,
            }
        ],
    }


def is_filename(name: str) -> bool:
    """Whether a slot file may have this name."""
    return _FILENAME.fullmatch(name) is not None and ".." not in name


def _params(slot: slot_pb2.Slot) -> Json:
    """The request's own settings where this gateway sent it, else what the service knows."""
    known = short_settings(params_of(slot.settings))
    try:
        noted = peer_json.read(slot.annotation.encode())
    except peer_json.UnreadableJson:
        return known
    if not isinstance(noted, Mapping):
        return known
    members = cast("Mapping[str, Json]", noted)
    return members if members.keys() == known.keys() else known


def _slot_id(text: str) -> int:
    """The leading integer of the path's last part, as the peer reads it."""
    match = _LEADING_INTEGER.match(text)
    if match is None or not -_INT32_MAX - 1 <= int(match[1]) <= _INT32_MAX:
        raise invalid("Invalid slot ID")
    return int(match[1])


def _wrapped(exchange: Exchange, asked: int) -> int:
    return wrap_slot_id(asked, exchange.backend.facts.info.num_slots)


async def _erase(exchange: Exchange, asked: int) -> Response:
    await exchange.connection.body()
    backend = exchange.backend
    request = slot_pb2.EraseSlotRequest(slot_id=_wrapped(exchange, asked))
    call = backend.service.slots.EraseSlot(request, metadata=backend.metadata)
    reply = await exchange.connection.while_connected(answer(call))
    return json_response({"id_slot": asked, "n_erased": reply.erased_tokens})


async def _save(exchange: Exchange, asked: int) -> Response:
    backend, members = exchange.backend, await _body(exchange)
    filename = _filename(members)
    request = slot_pb2.SaveSlotRequest(slot_id=_wrapped(exchange, asked), filename=filename)
    has_prompt = "prompt" in members
    if has_prompt:
        await _add_prompt(exchange, request, members["prompt"])
    call = backend.service.slots.SaveSlot(request, metadata=backend.metadata)
    reply = await exchange.connection.while_connected(answer(call))
    timings: dict[str, Json] = {"save_ms": microseconds(reply.elapsed) / 1000.0}
    if has_prompt:
        timings |= {
            "cache_n": reply.cached_tokens,
            "prompt_n": reply.saved_tokens - reply.cached_tokens,
            "prompt_ms": microseconds(reply.prefill_duration) / 1000.0,
        }
    return json_response(
        {
            "id_slot": asked,
            "filename": filename,
            "n_saved": reply.saved_tokens,
            "n_written": reply.size_bytes,
            "timings": timings,
        }
    )


async def _restore(exchange: Exchange, asked: int) -> Response:
    backend, filename = exchange.backend, _filename(await _body(exchange))
    request = slot_pb2.RestoreSlotRequest(slot_id=_wrapped(exchange, asked), filename=filename)
    call = backend.service.slots.RestoreSlot(request, metadata=backend.metadata)
    try:
        reply = await exchange.connection.while_connected(answer(call))
    except ApiError as error:
        raise from_restore(error) from error
    return json_response(
        {
            "id_slot": asked,
            "filename": filename,
            "n_restored": reply.restored_tokens,
            "n_read": reply.size_bytes,
            "timings": {"restore_ms": microseconds(reply.elapsed) / 1000.0},
        }
    )


async def _body(exchange: Exchange) -> Mapping[str, Json]:
    return members_of(await exchange.connection.json())


def _filename(members: Mapping[str, Json]) -> str:
    if "filename" not in members:
        raise server_fault("key 'filename' not found")
    filename = members["filename"]
    if not isinstance(filename, str):
        raise server_fault(wrong_type("string", filename))
    if not is_filename(filename):
        raise invalid("Invalid filename")
    return filename


async def _add_prompt(exchange: Exchange, request: slot_pb2.SaveSlotRequest, value: Json) -> None:
    """Adds the prompt that is computed first, in any shape that `/completion` takes for one."""
    prompts = read_prompts(value)
    if len(prompts) != 1:
        raise invalid(f'"prompt" has {len(prompts)} prompts, a slot holds one')
    backend, prompt = exchange.backend, prompts[0]
    check_vocabulary(prompts, backend.facts.model.vocab_size)
    if isinstance(value, str):
        request.text = value
        return
    request.vocabulary = backend.vocabulary
    request.tokens.ids.extend(await tokenize(backend, prompt))


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvarts.v1 import error_reason_pb2, model_pb2

from gateway.options import GatewayOptions
from gateway.rpc_errors import from_rpc
from gateway.service import connect
from tests.unit.gateway.fake_service import failing

_C = grpc.StatusCode
ROWS = [
    (_C.INVALID_ARGUMENT, "INVALID_FIELD", 400, "invalid_request_error"),
    (_C.UNAUTHENTICATED, "BAD_API_KEY", 401, "authentication_error"),
    (_C.PERMISSION_DENIED, "ADMIN_ONLY", 403, "permission_error"),
    (_C.UNAVAILABLE, "MODEL_LOADING", 503, "unavailable_error"),
    (_C.UNAVAILABLE, "REBUILDING", 503, "unavailable_error"),
    (_C.UNAVAILABLE, "SHUTTING_DOWN", 503, "unavailable_error"),
    (_C.INTERNAL, "INTERNAL", 500, "server_error"),
    (_C.INTERNAL, "ENGINE_FAULT", 500, "server_error"),
    (_C.DEADLINE_EXCEEDED, "DEADLINE", 504, "timeout_error"),
    (_C.UNIMPLEMENTED, "NOT_SUPPORTED", 501, "not_supported_error"),
    (_C.OUT_OF_RANGE, "BATCH_OVERFLOW", 500, "server_error"),
    (_C.INVALID_ARGUMENT, "BAD_GRAMMAR", 400, "invalid_request_error"),
    (_C.INVALID_ARGUMENT, "TOKEN_NOT_IN_VOCAB", 400, "invalid_request_error"),
    (_C.ABORTED, "VOCABULARY_CHANGED", 503, "unavailable_error"),
    (_C.RESOURCE_EXHAUSTED, "QUEUE_FULL", 503, "unavailable_error"),
    (_C.RESOURCE_EXHAUSTED, "KV_PAGES_EXHAUSTED", 500, "server_error"),
    (_C.ALREADY_EXISTS, "DUPLICATE_REQUEST", 409, "conflict_error"),
    (_C.NOT_FOUND, "NO_SUCH_SLOT", 400, "invalid_request_error"),
    (_C.UNIMPLEMENTED, "SLOT_SAVE_DISABLED", 501, "not_supported_error"),
    (_C.ABORTED, "SLOT_BUSY", 409, "conflict_error"),
    (_C.NOT_FOUND, "SLOT_CONTENT_NOT_FOUND", 400, "invalid_request_error"),
    (_C.NOT_FOUND, "SLOT_FILE_NOT_FOUND", 400, "invalid_request_error"),
    (_C.FAILED_PRECONDITION, "SLOT_FILE_MISMATCH", 400, "invalid_request_error"),
    (_C.DATA_LOSS, "SLOT_FILE_CORRUPT", 400, "invalid_request_error"),
    (_C.OUT_OF_RANGE, "SLOT_CONTEXT_TOO_SMALL", 400, "invalid_request_error"),
    (_C.RESOURCE_EXHAUSTED, "DISK_FULL", 500, "server_error"),
    (_C.INTERNAL, "SLOT_IO", 500, "server_error"),
    (_C.UNAVAILABLE, "IDENTITY_PENDING", 503, "unavailable_error"),
    (_C.FAILED_PRECONDITION, "MODEL_FILE_CHANGED", 400, "invalid_request_error"),
    (_C.NOT_FOUND, "NO_SUCH_ADAPTER", 400, "invalid_request_error"),
    (_C.ALREADY_EXISTS, "ADAPTER_EXISTS", 409, "conflict_error"),
    (_C.PERMISSION_DENIED, "PATH_OUTSIDE_ROOT", 403, "permission_error"),
    (_C.NOT_FOUND, "ADAPTER_FILE_NOT_FOUND", 404, "not_found_error"),
    (_C.INVALID_ARGUMENT, "ADAPTER_FILE_INVALID", 400, "invalid_request_error"),
    (_C.FAILED_PRECONDITION, "ADAPTER_MISMATCH", 400, "invalid_request_error"),
    (_C.OUT_OF_RANGE, "RANK_TOO_LARGE", 400, "invalid_request_error"),
    (_C.RESOURCE_EXHAUSTED, "ADAPTER_ROOM", 503, "unavailable_error"),
    (_C.ABORTED, "ADAPTER_IN_USE", 409, "conflict_error"),
    (_C.ABORTED, "POOLS_BUSY", 409, "conflict_error"),
    (_C.NOT_FOUND, "NO_SUCH_POOL", 404, "not_found_error"),
    (_C.OUT_OF_RANGE, "BELOW_FLOOR", 400, "invalid_request_error"),
    (_C.OUT_OF_RANGE, "TOO_LARGE", 400, "invalid_request_error"),
    (_C.INTERNAL, "REBUILD_ROLLED_BACK", 500, "server_error"),
    (_C.INTERNAL, "REBUILD_FAILED", 500, "server_error"),
    (_C.INVALID_ARGUMENT, "MODEL_FILE_INVALID", 400, "invalid_request_error"),
    (_C.UNIMPLEMENTED, "MODEL_NOT_SUPPORTED", 501, "not_supported_error"),
    (_C.ABORTED, "MODEL_SWAP_BUSY", 409, "conflict_error"),
    (_C.NOT_FOUND, "MODEL_FILE_NOT_FOUND", 400, "invalid_request_error"),
    (_C.ABORTED, "MODEL_IN_USE", 409, "conflict_error"),
    (_C.OUT_OF_RANGE, "MODEL_TOO_LARGE", 400, "invalid_request_error"),
    (_C.INTERNAL, "MODEL_ROLLED_BACK", 500, "server_error"),
    (_C.INTERNAL, "MODEL_LOST", 500, "server_error"),
]


def rpc_error(code: grpc.StatusCode, trailers: dict[str, bytes] | None = None):
    metadata = grpc.aio.Metadata(*(trailers or {}).items())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details="why")


def refused(code: grpc.StatusCode, reason: str, **told: str):
    refusal = failing(code, reason, "why", retry_s=2, **told)
    return rpc_error(code, {"grpc-status-details-bin": refusal.status.SerializeToString()})


@pytest.mark.parametrize(("code", "reason", "status", "kind"), ROWS)
def test_reasons(code: grpc.StatusCode, reason: str, status: int, kind: str):
    body = from_rpc(refused(code, reason)).body
    assert (body.kind.status, body.kind.type) == (status, kind)
    assert body.headers == {"x-kvarts-reason": reason, "retry-after": "2"}


def test_every_reason_of_a_call_has_a_row():
    names = {name.removeprefix("ERROR_REASON_") for name, _ in error_reason_pb2.ErrorReason.items()}
    with_numbers = {"CONTEXT_OVERFLOW", "GRAMMAR_DEAD_END"}
    assert names - {"UNSPECIFIED"} - with_numbers == {reason for _, reason, _, _ in ROWS}


def test_a_text_of_an_encoder_is_the_peers_fault():
    error = refused(_C.UNIMPLEMENTED, "NOT_SUPPORTED", feature="text generation")
    body = from_rpc(error).body
    assert body.to_json() == {
        "code": 500,
        "message": "the current context does not support logits computation. skipping",
        "type": "server_error",
    }
    assert body.headers["x-kvarts-reason"] == "NOT_SUPPORTED"


def test_a_dead_end_tells_the_piece_and_its_token():
    error = refused(_C.INTERNAL, "GRAMMAR_DEAD_END", piece=" there", tokenId="383")
    assert from_rpc(error).body.to_json() == {
        "code": 500,
        "message": "got exception: Unexpected empty grammar stack after accepting piece:  there (383)",
        "type": "server_error",
    }


def test_a_bad_grammar_tells_the_cause_behind_the_words_of_the_peer():
    error = refused(_C.INVALID_ARGUMENT, "BAD_GRAMMAR", line="1", detail="why")
    message = "Failed to initialize samplers: failed to parse grammar: why"
    assert from_rpc(error).body.message == message


def test_a_bad_schema_is_told_as_the_peer_tells_it():
    error = refused(_C.INVALID_ARGUMENT, "BAD_GRAMMAR", path="#", detail="why")
    assert from_rpc(error).body.message == "JSON schema conversion failed:\nwhy"


def test_an_overflow_tells_both_numbers():
    error = refused(_C.OUT_OF_RANGE, "CONTEXT_OVERFLOW", promptTokens="9", contextTokens="8")
    assert from_rpc(error).body.to_json() == {
        "code": 400,
        "message": "request (9 tokens) exceeds the available context size (8 tokens), try "
        "increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 9,
        "n_ctx": 8,
    }


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (_C.UNAVAILABLE, 503, "the service cannot be reached"),
        # gRPC's words for a message that is too large hold the limit.
        (_C.RESOURCE_EXHAUSTED, 413, "why"),
        (_C.UNIMPLEMENTED, 501, "the call failed: UNIMPLEMENTED"),
        (_C.UNKNOWN, 500, "the call failed: UNKNOWN"),
        (_C.DEADLINE_EXCEEDED, 504, "the call failed: DEADLINE_EXCEEDED"),
    ],
)
def test_failures_without_a_reason_go_by_their_code(
    code: grpc.StatusCode, status: int, message: str
):
    for error in (rpc_error(code), rpc_error(code, {"grpc-status-details-bin": b"\xff"})):
        body = from_rpc(error).body
        assert (body.kind.status, body.message, body.headers) == (status, message, {})


async def test_a_socket_that_nobody_serves_is_not_named(tmp_path: Path):
    path = tmp_path / "private.sock"
    service = connect(GatewayOptions(service=f"unix:{path}"))
    try:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await service.model.GetModel(model_pb2.GetModelRequest())
    finally:
        await service.channel.close()
    # gRPC itself tells, which is what this is about.
    assert str(path) in (raised.value.details() or "")
    body = from_rpc(raised.value).body
    assert (body.kind.status, body.message) == (503, "the service cannot be reached")


def test_a_reason_of_a_newer_service_is_passed_on():
    body = from_rpc(refused(_C.OUT_OF_RANGE, "BRAND_NEW")).body
    assert (body.kind.status, body.headers["x-kvarts-reason"]) == (400, "BRAND_NEW")

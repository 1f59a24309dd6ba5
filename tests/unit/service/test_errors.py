from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from kvarts.v1 import error_reason_pb2

from engine import errors as engine_errors
from engine.adapters import errors as adapter_errors
from engine.errors import ContextOverflow, EngineError, InvalidField, QueueFull, SlotBusy
from engine.memory import errors as pool_errors
from engine.slots import errors as slot_errors
from service import errors as service_errors
from service import swap_errors
from service.errors import ERROR_TABLE, MAX_DETAILS_BYTES, InvalidFields, to_status

# Source: the contract's table; R marks the rows that carry a RetryInfo.
RETRY = {
    "MODEL_LOADING",
    "REBUILDING",
    "SHUTTING_DOWN",
    "QUEUE_FULL",
    "KV_PAGES_EXHAUSTED",
    "SLOT_BUSY",
    "IDENTITY_PENDING",
    "ADAPTER_IN_USE",
    "POOLS_BUSY",
    "MODEL_SWAP_BUSY",
    "MODEL_IN_USE",
}


def info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert [packed.Unpack(info) for packed in status.details].count(True) == 1
    return info


def subclasses(kind: type[EngineError]) -> set[type[EngineError]]:
    found = set(kind.__subclasses__())
    return found | {inner for outer in found for inner in subclasses(outer)}


def test_the_table_has_every_reason_of_the_contract_and_no_other() -> None:
    values = error_reason_pb2.DESCRIPTOR.enum_types_by_name["ErrorReason"].values
    names = {value.name.removeprefix("ERROR_REASON_") for value in values}
    assert set(ERROR_TABLE) == names - {"UNSPECIFIED"}


def test_every_error_class_is_in_the_table() -> None:
    modules = {
        module.__name__
        for module in (
            engine_errors,
            adapter_errors,
            pool_errors,
            slot_errors,
            service_errors,
            swap_errors,
        )
    }
    ours = {kind for kind in subclasses(EngineError) if kind.__module__ in modules}
    assert len(ours) > 15
    assert {kind.reason for kind in ours} <= set(ERROR_TABLE)


def test_the_rows_with_a_retry_hint_are_the_contracts() -> None:
    assert {reason for reason, row in ERROR_TABLE.items() if row.retry_s is not None} == RETRY


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT),
        ("CONTEXT_OVERFLOW", grpc.StatusCode.OUT_OF_RANGE),
        ("SLOT_BUSY", grpc.StatusCode.ABORTED),
        ("SLOT_FILE_CORRUPT", grpc.StatusCode.DATA_LOSS),
        ("SLOT_FILE_MISMATCH", grpc.StatusCode.FAILED_PRECONDITION),
        ("NO_SUCH_POOL", grpc.StatusCode.NOT_FOUND),
        ("TOO_LARGE", grpc.StatusCode.OUT_OF_RANGE),
        ("ADAPTER_EXISTS", grpc.StatusCode.ALREADY_EXISTS),
        ("PATH_OUTSIDE_ROOT", grpc.StatusCode.PERMISSION_DENIED),
        ("REBUILD_FAILED", grpc.StatusCode.INTERNAL),
    ],
)
def test_rows_that_no_call_of_this_build_reaches(reason: str, code: grpc.StatusCode) -> None:
    assert ERROR_TABLE[reason].code is code


def test_metadata_holds_every_variable_of_the_message() -> None:
    status = to_status(ContextOverflow(prompt_tokens=900, context_tokens=512))
    info = info_of(status)
    assert status.code == 11
    assert (info.reason, info.domain) == ("CONTEXT_OVERFLOW", "kvarts.v1")
    assert dict(info.metadata) == {"promptTokens": "900", "contextTokens": "512"}
    assert "900" in status.message
    assert "512" in status.message


def test_a_retry_hint_is_a_duration() -> None:
    retry = error_details_pb2.RetryInfo()
    status = to_status(QueueFull(queued=3, limit=3))
    assert any(packed.Unpack(retry) for packed in status.details)
    assert retry.retry_delay.ToMilliseconds() == 1000


def test_every_violation_is_listed() -> None:
    violations = tuple(InvalidField(f"f{i}", "bad") for i in range(5))
    bad = error_details_pb2.BadRequest()
    status = to_status(InvalidFields(violations))
    assert any(packed.Unpack(bad) for packed in status.details)
    assert [entry.field for entry in bad.field_violations] == ["f0", "f1", "f2", "f3", "f4"]
    assert {entry.reason for entry in bad.field_violations} == {"INVALID_FIELD"}


@given(st.text(max_size=20_000), st.integers(1, 60))
def test_no_text_makes_the_details_too_large_or_unsendable(text: str, count: int) -> None:
    hostile: list[EngineError] = [
        InvalidFields(tuple(InvalidField(text, text) for _ in range(count))),
        SlotBusy(slot_id=1, request_id=text),
    ]
    for error in hostile:
        status = to_status(error)
        assert status.ByteSize() <= MAX_DETAILS_BYTES
        assert info_of(status).reason == error.reason


def test_a_lone_surrogate_can_be_told() -> None:
    assert "?" in to_status(InvalidField("f", "\ud800")).message

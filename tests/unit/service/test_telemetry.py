from __future__ import annotations

import contextvars

import pytest

from service.telemetry import RpcRecord, begin, current, is_request_id, mint_request_id, trace_id

TRACE, SPAN = "a1" * 16, "b2" * 8


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        (f"00-{TRACE}-{SPAN}-01", TRACE),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        ("x" * 10_000, None),
    ],
)
def test_trace_ids(header: str | None, expected: str | None) -> None:
    assert trace_id(header) == expected


@pytest.mark.parametrize("text", ["a", "a" * 36, "!~"])
def test_request_ids(text: str) -> None:
    assert is_request_id(text)


def test_a_minted_request_id_is_one() -> None:
    assert is_request_id(mint_request_id())


@pytest.mark.parametrize("text", ["", "a" * 37, "a b", "a\n", "\u00e9", "\0"])
def test_texts_that_are_no_request_ids(text: str) -> None:
    assert not is_request_id(text)


def test_a_record_leaves_out_what_it_does_not_know() -> None:
    record = RpcRecord("S/M", "id", prompt_tokens=0, queue_s=0.0)
    assert record.fields() == {
        "rpc": "S/M",
        "request_id": "id",
        "prompt_tokens": 0,
        "queue_s": 0.0,
    }


def test_the_current_record_is_the_tasks_own() -> None:
    def inside() -> RpcRecord:
        begin(RpcRecord("S/M", "id"))
        return current()

    assert contextvars.copy_context().run(inside).request_id == "id"
    with pytest.raises(LookupError):
        contextvars.Context().run(current)

from __future__ import annotations

import json
import math
import struct
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import peer_json

# Values as llama-server printed them, and what they are.
PRINTED = [
    ("0.800000011920929", 0.800000011920929),
    ("0.0", 0.0),
    ("-1.0", -1.0),
    ("1e-05", 0.00001),
    ("0.0001", 0.0001),
    ("1.0000000000000001e-07", 1.0000000000000001e-07),
    ("3.4028234663852886e+38", 3.4028234663852886e38),
    ("-3.4028234663852886e+38", -3.4028234663852886e38),
    ("999999999999999.0", 999999999999999.0),
    ("1e+15", 1e15),
    ("1.234567890123456e+15", 1234567890123456.0),
    ("-9.007199254740992e+15", -9007199254740992.0),
    ("1e+16", 1e16),
    ("null", math.nan),
    ("null", -math.inf),
]


@pytest.mark.parametrize(("text", "value"), PRINTED)
def test_doubles_print_as_the_peers(text: str, value: float):
    assert peer_json.format_double(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_printed_doubles_read_back(value: float):
    assert json.loads(peer_json.format_double(value)) == value


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_single_precision_is_kept(value: float):
    assert peer_json.to_float32(value) == value


@given(st.floats(min_value=-3e38, max_value=3e38))
def test_rounding_is_that_of_a_float(value: float):
    assert struct.pack("<f", value) == struct.pack("<f", peer_json.to_float32(value))


def test_beyond_single_precision_is_the_largest():
    assert peer_json.to_float32(1e300) == peer_json.FLOAT32_MAX
    assert peer_json.to_float32(-(10**400)) == -peer_json.FLOAT32_MAX


def test_written_compactly_in_order():
    value: dict[str, Any] = {
        "b": [1, 0.5, None, True],
        "a": {},
        "": [],
        "é\u2028": 'x/\x01\x7f\n"\\',
    }
    assert peer_json.write(value) == (
        '{"b":[1,0.5,null,true],"a":{},"":[],"é\u2028":"x/\\u0001\x7f\\n\\"\\\\"}'.encode()
    )


def test_bytes_that_are_no_text_become_replacement_characters():
    assert peer_json.write([b"a\xe6\x97", b"\xff"]) == '["a\ufffd","\ufffd"]'.encode()


def test_scalars_of_a_class_of_their_own_are_written_as_their_base():
    class Named(StrEnum):
        ONE = "o"

    class Numbered(IntEnum):
        ONE = 1

    class Measured(float):
        pass

    assert peer_json.write([Named.ONE, Numbered.ONE, Measured(0.5)]) == b'["o",1,0.5]'


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_writes_what_every_reader_reads(value: object):
    assert json.loads(peer_json.write(value)) == value  # pyright: ignore[reportArgumentType] # any JSON


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"{'a': 1}",
        b'{"a": NaN}',
        b"[1e999]",
        b'"\xff"',
        b'"\\ud800"',
        b"[1] x",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
    ],
)
def test_unreadable_bodies_are_one_error(body: bytes):
    with pytest.raises(peer_json.UnreadableJson, match="parse error"):
        peer_json.read(body)


def test_a_byte_order_mark_is_skipped():
    assert peer_json.read(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}

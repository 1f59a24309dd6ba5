"""The frozen set: what it computes, and when two sets compute the same."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.effective import (
    BASE,
    EffectiveSet,
    SetMember,
    last_occurrence,
    make_set,
    split_key,
    to_float32,
)
from engine.requests import AdapterScale

A, B = bytes([1]) * 32, bytes([2]) * 32


def test_the_key_is_content_and_scale_bits() -> None:
    one = make_set([SetMember(0, 3, B, 0.5), SetMember(1, 0, A, 1.0)])
    assert one.key == A + struct.pack("<f", 1.0) + B + struct.pack("<f", 0.5)
    assert split_key(one.key) == ((A, 1.0), (B, 0.5))
    # Ids, places and the order of naming change nothing.
    assert make_set([SetMember(7, 1, A, 1.0), SetMember(4, 2, B, 0.5)]).key == one.key
    assert make_set([SetMember(0, 3, B, 0.25), SetMember(1, 0, A, 1.0)]).key != one.key


def test_zero_scales_are_dropped() -> None:
    assert make_set([SetMember(0, 0, A, 0.0), SetMember(1, 1, B, -0.0)]) == BASE
    assert BASE.key == b""
    assert BASE.at(5) == ()


def test_adapters_are_added_in_the_order_of_their_content() -> None:
    members = [SetMember(0, 3, B, 0.5), SetMember(1, 0, A, 1.0)]
    assert make_set(members).at(0) == ((0, 1.0), (3, 0.5))
    assert make_set(members).scales == (AdapterScale(0, 0.5), AdapterScale(1, 1.0))


def test_an_activated_set_leaves_the_beginning_alone() -> None:
    one = EffectiveSet((SetMember(0, 2, A, 1.0),), active_from=4)
    assert [one.at(i) for i in (3, 4)] == [(), ((2, 1.0),)]
    assert (one.span_end(0, 10), one.span_end(0, 3), one.span_end(4, 10)) == (4, 3, 10)
    assert one.is_activated
    assert not BASE.is_activated


@pytest.mark.parametrize(
    ("tokens", "wanted", "at"),
    [
        ((1, 2, 3, 2, 3, 4), (2, 3), 3),
        ((1, 2), (1, 2), 0),
        ((1, 2), (3,), None),
        ((), (3,), None),
        ((1,), (1, 2), None),
        # Bytes of the pattern occur between two tokens only: 0x00000100, 0x01000000.
        ((0x100, 0x1000000, 7), (0x1,), None),
        ((1, 0x100, 0x1000000), (1,), 0),
    ],
)
def test_the_last_occurrence(
    tokens: tuple[int, ...], wanted: tuple[int, ...], at: int | None
) -> None:
    assert last_occurrence(tokens, wanted) == at


@given(
    st.lists(st.sampled_from([0, 1, 0x100, 0x10000, 0x1000000]), max_size=12),
    st.lists(st.sampled_from([0, 1, 0x100, 0x10000]), min_size=1, max_size=3),
)
def test_the_last_occurrence_is_what_a_walk_finds(tokens: list[int], wanted: list[int]) -> None:
    starts = range(len(tokens) - len(wanted) + 1)
    found = [i for i in starts if tokens[i : i + len(wanted)] == wanted]
    assert last_occurrence(tokens, wanted) == (found[-1] if found else None)


def test_rounding() -> None:
    assert to_float32(0.1) == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert to_float32(1e-60) == 0
    assert to_float32(-1e300) == float("-inf")

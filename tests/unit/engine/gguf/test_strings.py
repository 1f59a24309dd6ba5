"""Strings against a list of the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gguf.strings import Strings

_LISTS = st.lists(st.binary(max_size=5), max_size=20)


@given(_LISTS)
def test_every_place_is_that_of_a_list(strings: list[bytes]) -> None:
    packed = Strings(strings)
    assert len(packed) == len(strings)
    assert list(packed) == strings
    for place in range(-len(strings), len(strings)):
        assert packed[place] == strings[place]
    assert list(packed[1:-1:2]) == strings[1:-1:2]
    assert packed.has_empty == (b"" in strings)


@given(_LISTS, _LISTS)
def test_equal_to_what_has_the_same_strings(one: list[bytes], another: list[bytes]) -> None:
    assert (Strings(one) == another) == (one == another)
    assert Strings(one) == tuple(one)
    assert Strings(one) != 1


@pytest.mark.parametrize("place", [2, -3])
def test_a_place_that_is_not_there_is_an_error(place: int) -> None:
    with pytest.raises(IndexError):
        Strings([b"a", b"b"])[place]

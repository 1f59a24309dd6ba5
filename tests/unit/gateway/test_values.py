"""Small conversions: timings, cut characters, prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.probabilities import cut_incomplete
from gateway.prompts import Prompt, read_prompts
from gateway.schema import CompletionParams
from gateway.settings import long_settings, short_settings
from gateway.timings import Timings


def test_timings_as_recorded():
    # From an exchange with llama-server: 5 prompt tokens in 1.039 ms, 16 tokens in 3.827 ms.
    timings = Timings(cached=0, evaluated=5, prompt_us=1039, predicted=16, predict_us=3827)
    assert timings.to_json() == {
        "cache_n": 0,
        "prompt_n": 5,
        "prompt_ms": 1.039,
        "prompt_per_token_ms": 0.20779999999999998,
        "prompt_per_second": 4812.319538017325,
        "predicted_n": 16,
        "predicted_ms": 3.827,
        "predicted_per_token_ms": 3.827 / 15,
        "predicted_per_second": 1e3 / 3.827 * 15,
    }


def test_one_token_has_no_rate_and_takes_at_least_a_microsecond():
    timings = Timings(cached=4, evaluated=1, prompt_us=338, predicted=1, predict_us=0).to_json()
    assert (timings["predicted_ms"], timings["predicted_per_token_ms"]) == (0.001, 0.0)
    assert timings["predicted_per_second"] == 0.0
    nothing = Timings(0, 0, 0, 0, 0).to_json()
    assert [value for value in nothing.values() if value] == []


@given(st.text(min_size=1))
def test_a_cut_character_is_dropped_and_whole_ones_stay(text: str):
    data = text.encode("utf-8", "replace")
    assert cut_incomplete(data) == data
    last = text[-1].encode("utf-8", "replace")
    for missing in range(1, len(last)):
        assert cut_incomplete(data[:-missing]) == data[: -len(last)]


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", [("a",)]),
        ([1, 2], [(1, 2)]),
        ([1, "a", 2.9], [(1, "a", 2)]),
        (["a", "b"], [("a",), ("b",)]),
        ([["a", 1], [], [5]], [("a", 1), (), (5,)]),
        ({"prompt_string": ["a", 1]}, [("a", 1)]),
        ([{"prompt_string": "a"}], [("a",)]),
    ],
)
def test_prompt_shapes(value: object, prompts: list[tuple[str | int, ...]]):
    assert read_prompts(value) == [Prompt(parts) for parts in prompts]


def test_the_short_settings_are_the_long_ones_without_their_texts():
    long = long_settings(CompletionParams(), bias=((5, float("-inf")), (6, 1.5)), preserved=(7,))
    assert long["logit_bias"] == [{"bias": None, "token": 5}, {"bias": 1.5, "token": 6}]
    short = short_settings(CompletionParams())
    assert (len(long), len(short)) == (49, 42)
    assert [key for key in long if key in short] == list(short)

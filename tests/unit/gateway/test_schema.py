from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import FieldError
from gateway.fields import Trigger
from gateway.schema import FIELDS, CompletionParams, Limits, read_params

DEFAULTS = CompletionParams()
LIMITS = Limits(num_slots=2)


def read(body: dict[str, Any], defaults: CompletionParams = DEFAULTS) -> CompletionParams:
    return read_params(body, defaults, LIMITS)


def refusal(body: dict[str, Any]) -> str:
    with pytest.raises(FieldError) as caught:
        read(body)
    return str(caught.value)


def test_nothing_given_is_the_defaults():
    assert read({"prompt": "x", "no_such_field": [1], "model": 5}) == DEFAULTS


def test_null_is_absent():
    assert read(dict.fromkeys(name for f in FIELDS for name in f.names or (f.parameter,))) == (
        DEFAULTS
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"n_predict": 3, "max_completion_tokens": 4, "max_tokens": 5}, 3),
        ({"max_tokens": 5, "max_completion_tokens": 4}, 4),
        ({"n_predict": None, "max_tokens": 5}, 5),
        ({"max_tokens": True}, 1),
        ({"max_tokens": 7.9}, 7),
    ],
)
def test_the_first_name_that_holds_a_value_wins(body: dict[str, Any], expected: int):
    assert read(body).n_predict == expected


def test_of_several_faults_the_first_in_the_peers_order_is_told():
    faults = {"n_discard": -1, "n_predict": -2}
    assert "n_predict" in refusal(faults)
    assert "n_predict" in refusal(dict(reversed(faults.items())))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"n_predict": -2},
            "Field 'n_predict': Value must be between -1 <= value <= 2147483647, but got -2",
        ),
        (
            {"max_tokens": 2**31},
            "Field 'max_tokens': Value must be between -1 <= value <= 2147483647, "
            "but got 2147483648",
        ),
        ({"n": 3}, "Field 'n': Value must be between 1 <= value <= 2, but got 3"),
        ({"n_cmpl": 0}, "Field 'n_cmpl': Value must be between 1 <= value <= 2, but got 0"),
        (
            {"adaptive_decay": 1.5},
            "Field 'adaptive_decay': Value must be between 0.000000 <= value <= 0.990000, "
            "but got 1.500000",
        ),
        (
            {"repeat_last_n": -1},
            "Field 'repeat_last_n': Value must be between 0 <= value <= 2147483647, but got -1",
        ),
        ({"temperature": "hot"}, "Field 'temperature': type must be number, but is string"),
        ({"top_k": []}, "Field 'top_k': type must be number, but is array"),
        ({"stream": "yes"}, "Field 'stream': type must be boolean, but is string"),
        ({"stream": 1}, "Field 'stream': type must be boolean, but is number"),
        ({"stop": ["a", 5]}, "Field 'stop': type must be string, but is number"),
        (
            {"t_max_predict_ms": True},
            "Field 't_max_predict_ms': type must be number, but is boolean",
        ),
        (
            {"stream_options": {"include_usage": 1}},
            "Field 'include_usage': type must be boolean, but is number",
        ),
        (
            {"dry_sequence_breakers": []},
            "Field 'dry_sequence_breakers': Error: dry_sequence_breakers must be a non-empty array "
            "of strings",
        ),
        (
            {"lora": {}},
            "Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields",
        ),
        ({"samplers": ["top_k", 5]}, "Field 'samplers': type must be string, but is number"),
        (
            {"samplers": "k" * 65},
            "Field 'samplers': there are 65 samplers, the limit is 64",
        ),
        (
            {"reasoning_format": "secret"},
            "Field 'reasoning_format': Unknown reasoning format: secret",
        ),
        (
            {"grammar_lazy": True, "grammar_triggers": []},
            "Field 'grammar_triggers': Error: no triggers set for lazy grammar!",
        ),
    ],
)
def test_refused(body: dict[str, Any], message: str):
    assert refusal(body) == message


LENIENT: list[tuple[dict[str, Any], str, object]] = [
    ({"temperature": -1}, "temperature", 0.0),
    ({"temperature": 1e300}, "temperature", 3.4028234663852886e38),
    ({"top_k": -5}, "top_k", 0),
    ({"top_k": 2.7}, "top_k", 2),
    ({"top_k": 2**40}, "top_k", 2**31 - 1),
    ({"top_p": 2}, "top_p", 1.0),
    ({"min_p": -1}, "min_p", 0.0),
    ({"min_p": 0.05}, "min_p", 0.05000000074505806),
    ({"mirostat": 7}, "mirostat", 2),
    ({"adaptive_target": 5}, "adaptive_target", 1.0),
    ({"seed": -1}, "seed", 4294967295),
    ({"seed": 2**32 + 7}, "seed", 7),
    ({"dry_base": 0.5}, "dry_base", 1.75),
    ({"dry_base": 2}, "dry_base", 2.0),
    ({"response_fields": "content"}, "response_fields", ()),
    ({"response_fields": ["a", "b/c"]}, "response_fields", ("a", "b/c")),
    ({"stop": "x"}, "stop", ("x",)),
    ({"stop": 5}, "stop", ()),
    ({"stop": [None, "a", [], ""]}, "stop", ("a", "")),
    ({"samplers": 5}, "samplers", DEFAULTS.samplers),
    ({"samplers": []}, "samplers", ()),
    ({"samplers": "kt?k"}, "samplers", ("top_k", "temperature", "top_k")),
    ({"samplers": ["Top-K", "minp", "nucleus", "?"]}, "samplers", ("top_k", "min_p", "top_p")),
    ({"logprobs": 3}, "n_probs", 3),
    ({"logprobs": False}, "n_probs", 0),
    ({"n_probs": 1, "logprobs": 3}, "n_probs", 1),
    ({"grammar": 5}, "grammar", ""),
    ({"json_schema": {}}, "json_schema", {"type": "object"}),
    ({"json_schema": {"a": 1}, "grammar": None}, "json_schema", None),
    ({"stream_options": {"include_usage": True}}, "include_usage", True),
    ({"stream_options": "x"}, "include_usage", False),
    ({"lora": [{"id": 2}, {"id": 1, "scale": 0.5}, {}, 7]}, "lora", ((1, 0.5), (2, 0.0))),
    (
        {"lora": [{"id": 2**31}, {"id": 10**30}, {"id": -(10**30)}, {"id": 1e300}]},
        "lora",
        ((-1, 0.0),),
    ),
    ({"lora": [{}]}, "lora", ((-1, 0.0),)),
    ({"lora": []}, "lora", ()),
    ({"preserved_tokens": "<think>"}, "preserved_texts", ("<think>",)),
]


@pytest.mark.parametrize(("body", "parameter", "expected"), LENIENT)
def test_leniency(body: dict[str, Any], parameter: str, expected: object):
    assert getattr(read(body), parameter) == expected


def test_logit_bias_in_every_form():
    assert read({"logit_bias": [[5, 1.5], ["a b", -2], [7, False]]}).logit_bias == (
        (5, 1.5),
        ("a b", -2.0),
        (7, -math.inf),
    )
    assert read({"logit_bias": {"5": 1, "-3": 2, "word": False}}).logit_bias == (
        (5, 1.0),
        (-3, 2.0),
        ("word", -math.inf),
    )


@pytest.mark.parametrize(
    "value", ["x", 5, [[432], ["x", "y"], 7, [None, 1], [True, 1], [1.5, 1], [4, True]]]
)
def test_bad_bias_entries_are_skipped(value: object):
    assert read({"logit_bias": value}).logit_bias == ()


def test_a_requests_bias_wipes_the_servers_ban_of_eos_and_the_flag_still_shows():
    server = CompletionParams(ignore_eos=True, is_eos_banned=True)
    wiped = read({"logit_bias": []}, server)
    assert (wiped.ignore_eos, wiped.is_eos_banned) == (True, False)
    asked = read({"logit_bias": [], "ignore_eos": True}, server)
    assert (asked.ignore_eos, asked.is_eos_banned) == (True, True)
    off = read({"ignore_eos": False}, server)
    assert (off.ignore_eos, off.is_eos_banned) == (False, False)


def test_an_empty_stop_list_is_the_servers():
    assert read({"stop": []}, CompletionParams(stop=("end",))).stop == ("end",)


def test_the_token_limit_falls_back_to_the_servers():
    server = CompletionParams(n_predict=64, server_n_predict=64)
    assert read({}, server).token_limit == 64
    assert read({"n_predict": -1}, server).token_limit == 64
    assert read({"n_predict": 100}, server).token_limit == 100
    assert read({"n_predict": 0}, server).token_limit == 0
    assert read({}).token_limit is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)
NAMES = sorted({name for f in FIELDS for name in f.names or (f.parameter,)})


@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "json_schema", "grammar", "grammar_triggers", "stream_options"]),
        JSON,
        max_size=6,
    )
)
def test_any_body_reads_or_is_refused_by_name(body: dict[str, Any]):
    try:
        params = read(body)
    except FieldError as error:
        named = error.name
        assert named in {*body, "include_usage"}  # both outcomes are right
    else:
        assert 0 <= params.seed < 2**32
        assert all(
            math.isfinite(value)
            for value in (params.temperature, params.top_p, params.min_p, params.mirostat_tau)
        )


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"type": 9, "value": "a"}, "there is no trigger of type 9"),
        ({"value": "a"}, "key 'type' not found"),
        ({"type": 1}, "key 'value' not found"),
        ({"type": 0, "value": "a"}, "key 'token' not found"),
        ({"type": "1", "value": "a"}, "type must be number, but is string"),
        ({"type": 1, "value": 2}, "type must be string, but is number"),
    ],
)
def test_a_trigger_of_an_unknown_type_is_refused(entry: dict[str, Any], problem: str):
    with pytest.raises(FieldError, match=f"Field 'grammar_triggers': {problem}"):
        read({"grammar_triggers": [entry]})


def test_triggers_are_read_in_order():
    entries = [{"type": 1, "value": "a"}, {"type": 0, "value": "b", "token": 7}]
    assert read({"grammar_triggers": entries}).grammar_triggers == (
        Trigger(1, "a"),
        Trigger(0, "b", 7),
    )

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from engine.errors import (
    ContextOverflow,
    InvalidField,
    KvPagesExhausted,
    NoSuchAdapter,
    NoSuchSlot,
    TokenNotInVocab,
)
from engine.requests import AdapterScale, Request, SamplingParams
from engine.validation import RequestLimits, check_request

LIMITS = RequestLimits(num_slots=2, vocab_size=100, context_tokens=64, kv_pages=6, page_tokens=8)
GOOD = Request("r", prompt=(1, 2, 3))


def check(request: Request) -> None:
    check_request(request, LIMITS)


def test_the_defaults_pass() -> None:
    check(GOOD)
    check(Request("r", prompt=()))


_FLOAT_FIELDS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if isinstance(getattr(SamplingParams(), field.name), float)
]


@pytest.mark.parametrize("name", _FLOAT_FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_every_number_is_a_finite_float32(name: str, value: float) -> None:
    sampling = dataclasses.replace(SamplingParams(), **{name: value})
    with pytest.raises(InvalidField) as refusal:
        check(dataclasses.replace(GOOD, sampling=sampling))
    assert refusal.value.field == f"sampling.{name}"


# The ranges of contract 2.2, at both sides of each limit.
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("seed", (0, 2**32 - 1), (-1, 2**32)),
        ("temperature", (0.0, 100.0), (-0.001,)),
        ("top_k", (0, 2**31 - 1), (-1, 2**31)),
        ("top_p", (0.0, 1.0), (-0.001, 1.001)),
        ("min_p", (0.0, 1.0), (-0.001, 1.001)),
        ("typical_p", (-1.0, 2.0), ()),
        ("top_n_sigma", (-1.0, 9.0), ()),
        ("xtc_probability", (0.0, 1.0), (-0.001, 1.001)),
        ("xtc_threshold", (0.0, 1.0), (-0.001, 1.001)),
        ("repeat_last_n", (0, 2**31 - 1), (-1, 2**31)),
        ("repeat_penalty", (0.001, 9.0), (0.0, -1.0)),
        ("dry_allowed_length", (0,), (-1, 2**31)),
        ("dry_penalty_last_n", (0,), (-1, 2**31)),
        ("adaptive_target", (-1.0, 1.0), (1.001,)),
        ("adaptive_decay", (0.0, 0.99, float(np.float32(0.99))), (-0.001, 0.991)),
        ("min_keep", (0,), (-1, 2**31)),
    ],
)
def test_sampling_ranges(name: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    for value in good:
        sampling = dataclasses.replace(SamplingParams(), **{name: value})
        check(dataclasses.replace(GOOD, sampling=sampling))
    for value in bad:
        sampling = dataclasses.replace(SamplingParams(), **{name: value})
        with pytest.raises(InvalidField, match=rf"sampling\.{name}: must be in .*, got "):
            check(dataclasses.replace(GOOD, sampling=sampling))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", (None, 0, 2**31 - 1), (-1, 2**31)),
        ("top_logprobs", (None, 0, 100_000), (-1, 2**31)),
        ("n_keep", (-1, 0, 2**31 - 1), (-2, 2**31)),
        ("n_discard", (0,), (-1, 2**31)),
        ("n_cache_reuse", (0,), (-1, 2**31)),
        ("n_indent", (0,), (-1, 2**31)),
        ("deadline_s", (None, -5.0, 0.0), (math.nan, math.inf)),
    ],
)
def test_budget_ranges(name: str, good: tuple[float | None, ...], bad: tuple[float, ...]) -> None:
    for value in good:
        check(dataclasses.replace(GOOD, **{name: value}))
    for value in bad:
        with pytest.raises(InvalidField, match=f"{name}: "):
            check(dataclasses.replace(GOOD, **{name: value}))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_time_limit_is_positive_and_finite(value: float) -> None:
    with pytest.raises(InvalidField, match="time_limit: "):
        check(dataclasses.replace(GOOD, time_limit_s=value))


@pytest.mark.parametrize("request_id", ["", "x" * 65])
def test_an_id_has_a_length(request_id: str) -> None:
    with pytest.raises(InvalidField, match="request_id: must have 1 to 64 characters"):
        check(dataclasses.replace(GOOD, request_id=request_id))


@pytest.mark.parametrize("token_id", [-1, 100, 2**31])
def test_token_ids_are_in_the_vocabulary(token_id: int) -> None:
    for request in (
        dataclasses.replace(GOOD, prompt=(1, token_id)),
        dataclasses.replace(GOOD, preserved_tokens=frozenset({token_id})),
        dataclasses.replace(GOOD, sampling=SamplingParams(logit_bias=((token_id, 1.0),))),
    ):
        with pytest.raises(TokenNotInVocab) as refusal:
            check(request)
        assert (refusal.value.token_id, refusal.value.vocab_size) == (token_id, 100)


@pytest.mark.parametrize("bias", [-math.inf, 5.0])
def test_a_bias_may_forbid(bias: float) -> None:
    check(dataclasses.replace(GOOD, sampling=SamplingParams(logit_bias=((3, bias),))))


@pytest.mark.parametrize("bias", [math.inf, math.nan, 1e39])
def test_a_bias_is_a_number(bias: float) -> None:
    with pytest.raises(InvalidField, match=r"sampling\.logit_bias\[3\]: "):
        check(dataclasses.replace(GOOD, sampling=SamplingParams(logit_bias=((3, bias),))))


def test_a_prompt_leaves_room_for_one_token() -> None:
    limits = dataclasses.replace(LIMITS, kv_pages=99)
    check_request(Request("r", (1,) * 63), limits)
    with pytest.raises(ContextOverflow) as refusal:
        check_request(Request("r", (1,) * 64), limits)
    assert (refusal.value.prompt_tokens, refusal.value.context_tokens) == (64, 64)


def test_a_prompt_fits_in_the_pool() -> None:
    check(Request("r", (1,) * 48))
    with pytest.raises(KvPagesExhausted) as refusal:
        check(Request("r", (1,) * 49))
    assert (refusal.value.needed, refusal.value.free) == (7, 6)


@pytest.mark.parametrize("slot_id", [-1, 2])
def test_a_pinned_slot_exists(slot_id: int) -> None:
    check(dataclasses.replace(GOOD, slot_id=1))
    with pytest.raises(NoSuchSlot):
        check(dataclasses.replace(GOOD, slot_id=slot_id))


def test_no_adapter_is_loaded() -> None:
    check(dataclasses.replace(GOOD, adapters=()))
    with pytest.raises(NoSuchAdapter, match="adapter id 3"):
        check(dataclasses.replace(GOOD, adapters=(AdapterScale(3, 0.0),)))

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest

from engine.errors import InvalidField, TokenNotInVocab
from engine.requests import SamplingParams
from engine.sampling.checks import check_params

FLOATS = [f.name for f in fields(SamplingParams) if f.type == "float"]


def _check(**changes: Any) -> None:
    check_params(SamplingParams(**changes), vocab_size=10)


def test_the_defaults_are_fine() -> None:
    _check()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_numbers_that_are_no_float32_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidField, match=re.escape(f"sampling.{name}: {value}")):
        _check(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", 1e-40),
        ("repeat_last_n", -1),
        ("repeat_last_n", 2**31),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", 2**40),
        ("min_keep", -1),
        ("top_k", 2**31),
        ("adaptive_decay", 1.0),
        ("adaptive_decay", -0.1),
        ("dry_sequence_breakers", ("x",) * 257),
        ("dry_sequence_breakers", ("é" * 20,) * 13),
        ("logit_bias", ((3, math.nan),)),
        ("logit_bias", ((3, math.inf),)),
        ("logit_bias", ((3, 1e39),)),
    ],
)
def test_out_of_range_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidField, match=f"sampling.{name}"):
        _check(**{name: value})


@pytest.mark.parametrize("token_id", [-1, 10])
def test_a_biased_token_must_exist(token_id: int) -> None:
    with pytest.raises(TokenNotInVocab, match=str(token_id)):
        _check(logit_bias=((token_id, 1.0),))


def test_a_bias_may_forbid() -> None:
    _check(logit_bias=((9, -math.inf), (0, 3.5)))


def test_a_top_k_below_0_is_off() -> None:
    _check(top_k=-1)

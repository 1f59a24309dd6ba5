from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidField, NotSupported, TokenNotInVocab
from engine.requests import Mirostat, Sampler, SamplingParams
from engine.sampling.chain import Chain
from engine.step import FloatArray
from tests.unit.engine.sampling.support import ArrayRow, make_vocab

VOCAB = make_vocab(300, eog=[2], end_token=2)
PROMPT = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7]
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SMALL = 60

# Tokens that llama.cpp's own sampler functions drew (compiled from its source, g++ 12, glibc) on
# the rows below with seed 42; "dry" adds 6 to the logits of tokens 5 to 8.
DRAWN_BY_LLAMA_CPP: dict[str, tuple[SamplingParams, list[int]]] = {
    "default": (
        replace(PLAIN, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
        [284, 157, 123, 16, 186, 79, 58, 294, 9, 120, 92, 58],
    ),
    "temperature": (
        replace(PLAIN, temperature=1.5),
        [238, 65, 235, 188, 127, 33, 137, 103, 42, 194, 13, 216],
    ),
    "cold": (
        replace(PLAIN, temperature=0.0),
        [277, 91, 149, 207, 265, 46, 104, 162, 220, 278, 92, 150],
    ),
    "top_k": (replace(PLAIN, top_k=7), [165, 124, 281, 29, 298, 46, 170, 228, 220, 133, 92, 5]),
    "top_p": (replace(PLAIN, top_p=0.6), [86, 157, 235, 194, 153, 79, 25, 17, 253, 21, 92, 203]),
    "top_p after temperature": (
        replace(
            PLAIN,
            temperature=3.0,
            top_p=0.9,
            top_k=100,
            samplers=(Sampler.TEMPERATURE, Sampler.TOP_P, Sampler.TOP_K),
        ),
        [186, 78, 269, 10, 226, 178, 131, 136, 141, 246, 158, 39],
    ),
    "min_p": (
        replace(PLAIN, min_p=0.02, temperature=2.0),
        [239, 59, 229, 188, 127, 33, 137, 103, 42, 199, 13, 216],
    ),
    "min_keep": (
        replace(PLAIN, top_p=0.01, min_keep=4),
        [99, 91, 248, 273, 21, 46, 137, 195, 220, 67, 92, 216],
    ),
    "typical_p": (
        replace(PLAIN, typical_p=0.5),
        [264, 32, 103, 16, 74, 297, 223, 37, 16, 298, 132, 177],
    ),
    "top_n_sigma": (
        replace(PLAIN, top_n_sigma=1.2, temperature=3.0),
        [239, 59, 235, 182, 127, 28, 137, 103, 42, 194, 13, 216],
    ),
    "typical_p after top_n_sigma": (
        replace(PLAIN, top_n_sigma=1.2, typical_p=0.9, top_k=60),
        [66, 177, 215, 95, 160, 198, 58, 268, 227, 133, 0, 249],
    ),
    "xtc": (
        replace(PLAIN, xtc_probability=0.6, xtc_threshold=0.02),
        [67, 65, 229, 122, 121, 33, 197, 90, 16, 48, 99, 296],
    ),
    "penalties": (
        replace(
            PLAIN, repeat_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4, repeat_last_n=8
        ),
        [245, 66, 230, 194, 122, 33, 137, 110, 42, 194, 13, 216],
    ),
    "dry": (
        replace(PLAIN, dry_multiplier=4.0, temperature=0.0),
        [7, 6, 5, 5, 8, 7, 6, 6, 220, 8, 7, 5],
    ),
    "dynatemp": (
        replace(PLAIN, temperature=1.2, dynatemp_range=0.9, dynatemp_exponent=1.4),
        [179, 256, 262, 69, 140, 112, 289, 182, 42, 272, 125, 65],
    ),
    "mirostat 1": (
        replace(PLAIN, mirostat_tau=4.0, temperature=1.3, mirostat=Mirostat.V1),
        [238, 157, 57, 194, 87, 79, 58, 17, 253, 298, 92, 236],
    ),
    "mirostat 2": (
        replace(PLAIN, mirostat_tau=2.0, mirostat_eta=0.3, temperature=1.3, mirostat=Mirostat.V2),
        [277, 91, 70, 207, 120, 79, 170, 162, 286, 278, 92, 183],
    ),
    "adaptive_p": (
        replace(
            PLAIN,
            adaptive_target=0.3,
            adaptive_decay=0.8,
            samplers=(Sampler.TOP_K, Sampler.ADAPTIVE_P),
        ),
        [239, 56, 233, 181, 132, 30, 137, 101, 42, 195, 16, 216],
    ),
    "no samplers": (
        replace(PLAIN, temperature=0.1, samplers=()),
        [239, 65, 229, 194, 121, 33, 137, 110, 42, 193, 13, 216],
    ),
    "everything": (
        replace(
            PLAIN,
            temperature=0.9,
            top_k=50,
            top_p=0.97,
            min_p=0.01,
            typical_p=0.97,
            top_n_sigma=2.0,
            xtc_probability=0.3,
            xtc_threshold=0.03,
            repeat_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            dry_multiplier=0.5,
            min_keep=2,
        ),
        [106, 190, 222, 69, 219, 79, 91, 50, 128, 153, 178, 210],
    ),
}


def _logits(step: int) -> FloatArray:
    # 7919 and 1009 are coprime, so no two are equal.
    mixed = np.array([(i * 7919 + step * 104729) % 1009 for i in range(300)], np.float32)
    return mixed / np.float32(64) - np.float32(8)


def _chain(
    params: SamplingParams,
    *,
    seed: int = 42,
    prompt: Sequence[int] = PROMPT,
    ignore_eos: bool = False,
) -> Chain:
    return Chain(params, vocab=VOCAB, prompt=prompt, seed=seed, ignore_eos=ignore_eos)


@pytest.mark.parametrize("name", DRAWN_BY_LLAMA_CPP)
def test_draws_what_llama_cpp_draws(name: str) -> None:
    params, expected = DRAWN_BY_LLAMA_CPP[name]
    chain = _chain(params)
    drawn: list[int] = []
    for step in range(len(expected)):
        logits = _logits(step)
        if name == "dry":
            logits[5:9] += np.float32(6)
        drawn.append(chain.sample(ArrayRow(logits)))
    assert drawn == expected


def _floats(*values: float, low: float, high: float) -> st.SearchStrategy[float]:
    return st.sampled_from(values) | st.floats(low, high, width=32)


@st.composite
def _params(draw: st.DrawFn) -> SamplingParams:
    names = [s for s in Sampler if s is not Sampler.INFILL]
    token_ids = st.integers(0, SMALL - 1)
    bias = st.tuples(token_ids, st.sampled_from([-math.inf, -4.0, 2.5, 6.0]))
    return SamplingParams(
        temperature=draw(_floats(0.0, 0.8, 1.0, low=0.125, high=3)),
        dynatemp_range=draw(st.sampled_from([0.0, 0.0, 0.5])),
        top_k=draw(st.sampled_from([0, 1, 3, 5, 8, 40, 100])),
        top_p=draw(_floats(1.0, 0.9, low=0, high=1)),
        min_p=draw(_floats(0.0, 0.05, low=0, high=0.5)),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.7])),
        top_n_sigma=draw(st.sampled_from([-1.0, -1.0, 1.0])),
        xtc_probability=draw(st.sampled_from([0.0, 0.0, 0.6])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -1.5])),
        dry_multiplier=draw(st.sampled_from([0.0, 1.0])),
        mirostat=draw(st.sampled_from([Mirostat.OFF] * 4 + [Mirostat.V1, Mirostat.V2])),
        adaptive_target=draw(st.sampled_from([-1.0, 0.4])),
        min_keep=draw(st.sampled_from([0, 0, 3])),
        logit_bias=tuple(draw(st.lists(bias, max_size=3))),
        samplers=draw(
            st.just(SamplingParams().samplers) | st.lists(st.sampled_from(names)).map(tuple)
        ),
    )


@settings(max_examples=300, deadline=None)
@given(
    params=_params(),
    rows=st.lists(
        st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=SMALL, max_size=SMALL),
        min_size=1,
        max_size=4,
    ),
    num_top=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    ignore_eos=st.booleans(),
)
def test_the_best_candidates_give_what_the_whole_row_gives(
    params: SamplingParams, rows: list[list[float]], num_top: int, seed: int, ignore_eos: bool
) -> None:
    vocab = make_vocab(SMALL, eog=[2, 7], end_token=2)
    few, all_ = (
        Chain(params, vocab=vocab, prompt=[1, 5, 9, 5, 9], seed=seed, ignore_eos=ignore_eos)
        for _ in range(2)
    )
    for logits in rows:
        assert few.sample(ArrayRow(logits, num_top=num_top)) == all_.sample(
            ArrayRow(logits, num_top=SMALL)
        )
        assert few.probabilities(99, post_chain=True) == all_.probabilities(99, post_chain=True)


@pytest.mark.parametrize(
    ("params", "num_full"),
    [
        (SamplingParams(), 0),
        (SamplingParams(repeat_penalty=1.2, dry_multiplier=0.5), 0),
        (replace(PLAIN, temperature=0.0, top_p=0.9), 0),
        (replace(PLAIN, min_p=0.3), 0),
        (PLAIN, 1),
        (replace(PLAIN, top_k=70), 1),
        (replace(PLAIN, top_p=0.9), 1),
    ],
)
def test_the_whole_row_is_asked_for_only_where_needed(
    params: SamplingParams, num_full: int
) -> None:
    row = ArrayRow(_logits(3))
    _chain(params).sample(row)
    assert row.num_full == num_full


def test_temperature_0_takes_the_first_of_the_largest() -> None:
    row = ArrayRow([0.0, 2.0, 1.0, 2.0])
    vocab = make_vocab(4)
    for samplers in (SamplingParams().samplers, (Sampler.TEMPERATURE,)):
        params = SamplingParams(temperature=0.0, samplers=samplers)
        assert Chain(params, vocab=vocab, prompt=[], seed=1).sample(row) == 1


def test_temperature_0_leaves_one_candidate_after_the_chain() -> None:
    chain = _chain(SamplingParams(temperature=0.0))
    best = chain.sample(ArrayRow(_logits(0)))
    assert chain.probabilities(5, post_chain=True) == (0.0, [(best, 0.0)])


def test_typical_p_before_temperature_0_may_drop_the_best() -> None:
    logits = np.log(np.array([0.5, 0.26, 0.24]))
    params = replace(PLAIN, temperature=0.0, typical_p=0.2)
    assert Chain(params, vocab=make_vocab(3), prompt=[], seed=1).sample(ArrayRow(logits)) == 1


def test_a_penalty_behind_a_truncation_comes_too_late() -> None:
    samplers = (Sampler.TOP_K, Sampler.PENALTIES, Sampler.TEMPERATURE)
    params = SamplingParams(temperature=0.0, top_k=1, presence_penalty=10.0, samplers=samplers)
    chain = Chain(params, vocab=make_vocab(3), prompt=[2], seed=1)
    assert chain.sample(ArrayRow([1.0, 2.0, 3.0])) == 2


def test_the_prompt_and_the_sampled_tokens_are_penalised() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=10.0)
    chain = Chain(params, vocab=make_vocab(4), prompt=[3], seed=1)
    row = ArrayRow([1.0, 2.0, 3.0, 4.0])
    assert [chain.sample(row) for _ in range(4)] == [2, 1, 0, 3]


def test_ignore_eos_and_suppressed_tokens_are_never_drawn() -> None:
    vocab = make_vocab(5, eog=[1, 2], suppressed=[3])
    chain = Chain(PLAIN, vocab=vocab, prompt=[], seed=1, ignore_eos=True)
    row = ArrayRow([0.0, 9.0, 9.0, 9.0, 0.0])
    assert {chain.sample(row) for _ in range(50)} == {0, 4}


def test_without_ignore_eos_an_end_may_be_drawn() -> None:
    vocab = make_vocab(5, eog=[1, 2], suppressed=[3])
    chain = Chain(PLAIN, vocab=vocab, prompt=[], seed=1)
    row = ArrayRow([0.0, 9.0, 9.0, 9.0, 0.0])
    assert {chain.sample(row) for _ in range(50)} <= {0, 1, 2, 4}


def test_a_sampler_named_twice_runs_twice() -> None:
    twice = replace(PLAIN, temperature=0.5, samplers=(Sampler.TEMPERATURE, Sampler.TEMPERATURE))
    once = replace(twice, temperature=0.25, samplers=(Sampler.TEMPERATURE,))
    rows = [ArrayRow(_logits(step)) for step in range(10)]
    first, second = _chain(twice), _chain(once)
    assert [first.sample(row) for row in rows] == [second.sample(row) for row in rows]


def test_mirostat_ignores_every_other_sampler() -> None:
    params = replace(PLAIN, mirostat=Mirostat.V2)
    other = replace(params, top_k=1, presence_penalty=50.0, samplers=(Sampler.INFILL,))
    rows = [ArrayRow(_logits(step)) for step in range(10)]
    first, second = _chain(params), _chain(other)
    assert [first.sample(row) for row in rows] == [second.sample(row) for row in rows]


def test_raw_probabilities_know_no_bias_and_no_temperature() -> None:
    logits = _logits(0)
    chain = _chain(SamplingParams(temperature=0.0, logit_bias=((277, -math.inf),)))
    sampled = chain.sample(ArrayRow(logits))
    total = math.log(np.exp(logits.astype(np.float64)).sum())
    value, top = chain.probabilities(2, post_chain=False)
    assert value == pytest.approx(float(logits[sampled]) - total)
    assert [token_id for token_id, _ in top] == [277, sampled]


def test_post_chain_probabilities_sum_to_1_over_what_top_k_left() -> None:
    chain = _chain(replace(PLAIN, top_k=3))
    sampled = chain.sample(ArrayRow(_logits(0)))
    value, top = chain.probabilities(10, post_chain=True)
    assert len(top) == 3
    assert dict(top)[sampled] == value
    assert sum(math.exp(p) for _, p in top) == pytest.approx(1.0)


def test_probabilities_before_the_first_sample_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no token"):
        _chain(PLAIN).probabilities(1, post_chain=False)


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        SamplingParams(),
        replace(PLAIN, temperature=1e-42),
        replace(PLAIN, typical_p=0.5, top_n_sigma=0.5),
        replace(PLAIN, dynatemp_range=0.5, dynatemp_exponent=-2.0),
        replace(PLAIN, mirostat=Mirostat.V1),
        replace(PLAIN, mirostat=Mirostat.V2, temperature=0.0),
        replace(PLAIN, samplers=(Sampler.ADAPTIVE_P,), adaptive_target=0.5),
        replace(PLAIN, samplers=(Sampler.INFILL,)),
        replace(PLAIN, xtc_probability=1.0, top_p=0.5, min_p=0.9, min_keep=9),
        replace(PLAIN, dry_multiplier=-3e38, dry_base=3e38, repeat_penalty=3e38),
    ],
)
@pytest.mark.parametrize("is_all_forbidden", [False, True])
def test_extreme_parameters_always_give_a_token(
    params: SamplingParams, is_all_forbidden: bool
) -> None:
    if is_all_forbidden:
        params = replace(params, logit_bias=tuple((i, -math.inf) for i in range(300)))
    chain = _chain(params)
    for step in range(5):
        assert 0 <= chain.sample(ArrayRow(_logits(step))) < 300
        chain.probabilities(3, post_chain=True)


def test_infill_needs_an_end_token() -> None:
    params = replace(PLAIN, samplers=(Sampler.INFILL,))
    with pytest.raises(NotSupported, match="infill"):
        Chain(params, vocab=make_vocab(3), prompt=[], seed=1)


def test_bad_parameters_are_refused_before_anything_is_built() -> None:
    with pytest.raises(InvalidField, match=r"sampling\.temperature"):
        _chain(replace(PLAIN, temperature=math.nan))
    with pytest.raises(TokenNotInVocab, match="300"):
        _chain(replace(PLAIN, logit_bias=((300, 1.0),)))
    with pytest.raises(ValueError, match="4294967296"):
        _chain(PLAIN, seed=2**32)

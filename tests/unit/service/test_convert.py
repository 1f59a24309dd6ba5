from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvarts.v1 import common_pb2, generation_pb2, slot_pb2

from engine.requests import AdapterScale, Mirostat, Request, Sampler, SamplingParams
from engine.types import Finished, FinishReason, SlotInfo, SlotState
from service import convert
from service.defaults import GenerationDefaults

UNIT = st.floats(0, 1, width=32)
COUNT = st.integers(0, 2**31 - 1)
POSITIVE = st.floats(0, 1000, width=32)
PARAMS = st.builds(
    SamplingParams,
    seed=st.none() | st.integers(0, 2**32 - 2),
    temperature=POSITIVE,
    dynatemp_range=POSITIVE,
    dynatemp_exponent=POSITIVE,
    top_k=COUNT,
    top_p=UNIT,
    min_p=UNIT,
    typical_p=POSITIVE,
    top_n_sigma=st.floats(-10, 10, width=32),
    xtc_probability=UNIT,
    xtc_threshold=UNIT,
    repeat_last_n=COUNT,
    repeat_penalty=POSITIVE,
    frequency_penalty=st.floats(-10, 10, width=32),
    presence_penalty=st.floats(-10, 10, width=32),
    dry_multiplier=POSITIVE,
    dry_base=POSITIVE,
    dry_allowed_length=COUNT,
    dry_penalty_last_n=COUNT,
    dry_sequence_breakers=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    mirostat=st.sampled_from(Mirostat),
    mirostat_tau=POSITIVE,
    mirostat_eta=POSITIVE,
    adaptive_target=st.floats(-1, 1, width=32),
    adaptive_decay=UNIT,
    min_keep=COUNT,
    # An empty map means the server's biases, so it cannot stand for none.
    logit_bias=st.dictionaries(
        st.integers(0, 9), st.floats(allow_nan=False, width=32), min_size=1
    ).map(lambda bias: tuple(sorted(bias.items()))),
    samplers=st.lists(st.sampled_from(Sampler), max_size=5).map(tuple),
)


def requests(message: generation_pb2.GenerateRequest, **changes: Any) -> tuple[Request, ...]:
    arguments: dict[str, Any] = {
        "request_id": "r",
        "prompt": (1, 2),
        "defaults": GenerationDefaults(),
        "deadline_s": None,
        "tenant": "",
        **changes,
    }
    return convert.to_requests(message, **arguments)


@given(PARAMS)
def test_sampling_survives_the_round_trip_whatever_the_defaults(params: SamplingParams) -> None:
    message = convert.from_sampling(params)
    assert convert.to_sampling(message, SamplingParams(seed=params.seed, top_k=7)) == params


@given(PARAMS)
def test_an_empty_message_is_the_defaults(params: SamplingParams) -> None:
    assert convert.to_sampling(generation_pb2.SamplingParams(), params) == params


def test_every_field_of_sampling_crosses() -> None:
    ours = {field.name for field in fields(SamplingParams)}
    theirs = {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields}
    assert ours == theirs


def test_the_greatest_seed_is_a_fresh_one() -> None:
    message = generation_pb2.SamplingParams(seed=2**32 - 1)
    assert convert.to_sampling(message, SamplingParams(seed=5)).seed is None


def test_a_silent_request_takes_the_defaults() -> None:
    defaults = GenerationDefaults(
        max_tokens=5,
        stop=("s",),
        ignore_eos=True,
        cache_prompt=False,
        n_keep=3,
        n_cache_reuse=4,
        render_special=True,
    )
    (request,) = requests(generation_pb2.GenerateRequest(), defaults=defaults)
    assert request == Request(
        "r",
        (1, 2),
        max_tokens=5,
        stop=("s",),
        ignore_eos=True,
        cache_prompt=False,
        n_keep=3,
        n_cache_reuse=4,
        render_special=True,
        group="r",
    )


def test_a_request_overrules_the_defaults_with_falsy_values_too() -> None:
    defaults = GenerationDefaults(
        max_tokens=5,
        ignore_eos=True,
        cache_prompt=True,
        n_keep=3,
        n_cache_reuse=4,
        render_special=True,
    )
    message = generation_pb2.GenerateRequest(
        max_tokens=0,
        ignore_eos=False,
        cache_prompt=False,
        n_keep=0,
        n_cache_reuse=0,
        render_special=False,
        slot_id=0,
        top_logprobs=0,
        adapters=common_pb2.AdapterScales(),
    )
    (request,) = requests(message, defaults=defaults)
    assert request == Request(
        "r",
        (1, 2),
        max_tokens=0,
        cache_prompt=False,
        slot_id=0,
        top_logprobs=0,
        adapters=(),
        group="r",
    )


def test_samples_have_ids_and_seeds_of_their_own() -> None:
    message = generation_pb2.GenerateRequest(num_samples=3)
    message.sampling.seed = 7
    found = requests(message)
    assert [request.request_id for request in found] == ["r", "r/1", "r/2"]
    assert {request.group for request in found} == {"r"}
    assert [request.sampling.seed for request in found] == [7, 8, 9]
    message.sampling.ClearField("seed")
    assert {request.sampling.seed for request in requests(message)} == {None}


def test_settings_tell_what_a_request_runs_under() -> None:
    request = Request(
        "r",
        (1,),
        max_tokens=3,
        stop=("a",),
        time_limit_s=1.5,
        adapters=(AdapterScale(0, 0.0), AdapterScale(1, 2.0)),
        preserved_tokens=frozenset({3, 1}),
    )
    settings = convert.from_settings(request)
    assert (settings.max_tokens, settings.stop) == (3, ["a"])
    assert settings.time_limit.ToMilliseconds() == 1500
    assert [entry.adapter_id for entry in settings.adapters.scales] == [1]
    assert settings.preserved_tokens == [1, 3]
    assert not convert.from_settings(Request("r", (1,))).HasField("max_tokens")
    assert not convert.from_settings(Request("r", (1,))).HasField("time_limit")


def finished(**changes: Any) -> Finished:
    values: dict[str, Any] = {
        "reason": FinishReason.EOS,
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "completion_tokens": 1,
        "held_tokens": 1,
        "unsent_text": "",
        "has_new_line": False,
        "truncated": False,
        "queue_s": 0.25,
        "prefill_s": 0.5,
        "decode_s": 0.125,
        **changes,
    }
    return Finished(**values)


def test_what_matched_is_a_text_a_token_or_nothing() -> None:
    assert convert.from_finished(finished(), 0).WhichOneof("matched") is None
    by_token = convert.from_finished(finished(stop_token_id=0), 0)
    assert (by_token.WhichOneof("matched"), by_token.stop_token_id) == ("stop_token_id", 0)
    by_text = convert.from_finished(finished(stop_string="", stop_token_id=1), 0)
    assert by_text.WhichOneof("matched") == "stop_string"


def test_what_an_indent_takes_back_is_told() -> None:
    assert convert.from_finished(finished(indent_cut_chars=3), 0).indent_cut_chars == 3


@pytest.mark.parametrize("reason", FinishReason)
def test_every_reason_has_its_name(reason: FinishReason) -> None:
    number = convert.from_finished(finished(reason=reason), 0).finish_reason
    assert generation_pb2.FinishReason.Name(number) == f"FINISH_REASON_{reason.name}"


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("remaining", [-1, 0, 5])
def test_slots(state: SlotState, remaining: int) -> None:
    slot = SlotInfo(
        slot_id=1,
        state=state,
        context_tokens=64,
        held_tokens=9,
        pages=1,
        evaluated_tokens=2,
        cached_tokens=3,
        decoded_tokens=4,
        remaining_tokens=remaining,
        has_new_line=True,
        task_id=0,
        request=Request("r", (1,)),
    )
    message = convert.from_slot(slot)
    assert message.HasField("remaining_tokens") == (remaining >= 0)
    assert message.HasField("task_id")
    assert slot_pb2.SlotState.Name(message.state) == f"SLOT_STATE_{state.name}"


@given(st.floats(0, 1e9))
def test_durations_are_kept_to_the_nanosecond(seconds: float) -> None:
    assert abs(convert.to_duration(seconds).ToNanoseconds() - seconds * 1e9) <= 1

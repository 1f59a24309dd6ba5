"""Bad values in every field of every request, found by descriptors, and mutated messages."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kvarts.v1 import common_pb2, generation_pb2, rebuild_pb2, tokenization_pb2

from engine.errors import InvalidField
from service.validate import Limits, check_generate
from tests.contract.calls import CHAT, RPCS, Rpc
from tests.contract.serving import GenerateRequest, SamplingParams, failure, read_failure, serving

Code = grpc.StatusCode
FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), -2, -1, 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**53 + 1, 2**63, 2**64 - 1),
}
TEXTS = ("", "\0", "\ud7ff\U0010ffff", "x" * 70_000, "../x", "NaN", "null")
# What a field of this build may honestly answer to a legal but useless value.
HONEST = {
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.NOT_FOUND,
    Code.UNIMPLEMENTED,
    Code.RESOURCE_EXHAUSTED,
}

Path = tuple[FieldDescriptor, ...]


def fields(message: Descriptor, path: Path = ()) -> Iterator[Path]:
    """Every scalar field below a message; a message inside itself is not entered again."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield (*path, field)
        elif inner.full_name not in {f.message_type.full_name for f in path if f.message_type}:
            yield from fields(inner, (*path, field))


def put(request: Message, path: Path, value: Any) -> str:
    """Sets a field and returns its name as faults give it."""
    holder: Any = request
    name = ""
    for field in path[:-1]:
        if field.is_repeated:
            entries = getattr(holder, field.name)
            holder = entries.add() if not entries else entries[0]
            name += f"{field.name}[0]."
        else:
            holder = getattr(holder, field.name)
            holder.SetInParent()
            name += f"{field.name}."
    last = path[-1]
    if last.is_repeated:
        getattr(holder, last.name).append(value)
        return f"{name}{last.name}[{len(getattr(holder, last.name)) - 1}]"
    setattr(holder, last.name, value)
    return name + last.name


def cases(rpc: Rpc, kinds: tuple[int, ...]) -> Iterator[Path]:
    for path in fields(rpc.descriptor.input_type):
        last = path[-1]
        if last.type in kinds and last.message_type is None:
            yield path


async def answer(rpc: Rpc, channel: grpc.aio.Channel, request: Message) -> Any:
    failed = await rpc.call(channel, request.SerializeToString())
    return None if failed is None else read_failure(failed)


async def test_no_float_may_be_nan_or_infinite() -> None:
    seen = 0
    async with serving() as it:
        for rpc in RPCS:
            for path in cases(rpc, FLOATS):
                for value in (math.nan, math.inf, -math.inf, 1e400):
                    request = rpc.request()
                    name = put(request, path, value)
                    failed = await answer(rpc, it.channel, request)
                    assert failed is not None, (rpc.name, name, value)
                    assert failed.reason == "INVALID_FIELD", (rpc.name, name, value)
                    assert name in failed.fields, (rpc.name, name, failed.fields)
                    assert "not a finite number" in failed.text
                    seen += 1
    assert seen > 60


async def test_no_enum_may_hold_a_number_without_a_name() -> None:
    seen = 0
    async with serving() as it:
        for rpc in RPCS:
            for path in cases(rpc, (FieldDescriptor.TYPE_ENUM,)):
                for value in (99, -1, 2**31 - 1):
                    request = rpc.request()
                    name = put(request, path, value)
                    failed = await answer(rpc, it.channel, request)
                    assert failed is not None, (rpc.name, name, value)
                    assert name in failed.fields, (rpc.name, name, failed)
                    assert str(value) in failed.text
                    seen += 1
    assert seen > 10


async def test_integers_at_their_ends_get_an_answer_or_a_named_fault() -> None:
    async with serving() as it:
        for rpc in RPCS:
            for path in cases(rpc, tuple(INTEGERS)):
                for value in INTEGERS[path[-1].type]:
                    request = rpc.request()
                    name = put(request, path, value)
                    failed = await answer(rpc, it.channel, request)
                    assert failed is None or failed.code in HONEST, (rpc.name, name, value, failed)
                    if failed is not None and failed.reason == "INVALID_FIELD":
                        assert failed.fields, (rpc.name, name)


async def test_texts_of_all_kinds_get_an_answer_or_a_named_fault() -> None:
    async with serving() as it:
        for rpc in RPCS:
            for path in cases(rpc, (FieldDescriptor.TYPE_STRING,)):
                for value in TEXTS:
                    request = rpc.request()
                    name = put(request, path, value)
                    failed = await answer(rpc, it.channel, request)
                    # Any text may be a vocabulary's name; whoever names another may try again.
                    is_stale = failed is not None and failed.reason == "VOCABULARY_CHANGED"
                    if name == "vocabulary" and is_stale:
                        continue
                    assert failed is None or failed.code in HONEST, (rpc.name, name, value, failed)


COUNTS = ("max_tokens", "n_keep", "n_discard", "n_cache_reuse", "n_indent")
SAMPLING_COUNTS = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep")


@pytest.mark.parametrize("name", [*COUNTS, *(f"sampling.{count}" for count in SAMPLING_COUNTS)])
async def test_counts_end_at_the_greatest_int32(name: str) -> None:
    request = GenerateRequest(text="x")
    holder: Any = request.sampling if "." in name else request
    if name == "n_keep":
        holder.n_keep = -2
    else:
        setattr(holder, name.rpartition(".")[2], 2**31)
    async with serving() as it:
        failed = await failure(it.collect(request))
    assert failed.fields == [name]
    assert "is not between" in failed.text


RANGES: list[tuple[str, float]] = [
    ("temperature", -0.1),
    ("dynatemp_range", -0.1),
    ("dynatemp_exponent", -0.1),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("typical_p", -0.1),
    ("xtc_probability", -0.1),
    ("xtc_probability", 1.1),
    ("xtc_threshold", -0.1),
    ("xtc_threshold", 1.1),
    ("repeat_penalty", 0.0),
    ("repeat_penalty", -1.0),
    ("dry_multiplier", -0.1),
    ("dry_base", 0.9),
    ("mirostat_tau", -0.1),
    ("mirostat_eta", -0.1),
    ("adaptive_target", 1.1),
    ("adaptive_decay", -0.1),
    ("adaptive_decay", 0.991),
]


@pytest.mark.parametrize(("name", "value"), RANGES)
async def test_sampling_numbers_out_of_range(name: str, value: float) -> None:
    sampling = SamplingParams(**cast("Any", {name: value}))
    async with serving() as it:
        failed = await failure(it.collect(GenerateRequest(text="x", sampling=sampling)))
    assert failed.fields == [f"sampling.{name}"]
    assert f"{value:.3g}" in failed.text


CallGroup = generation_pb2.CallGroup
BAD: list[tuple[GenerateRequest, str]] = [
    (GenerateRequest(), "prompt"),
    (GenerateRequest(text="x", request_id="a" * 37), "request_id"),
    (GenerateRequest(text="x", request_id="\u00e9"), "request_id"),
    (GenerateRequest(text="x", num_samples=5), "num_samples"),
    (GenerateRequest(text="x", num_samples=2, slot_id=0), "slot_id"),
    (GenerateRequest(text="x", group=CallGroup(num_calls=2)), "group.id"),
    (GenerateRequest(text="x", group=CallGroup(id="\u00e9", num_calls=2)), "group.id"),
    (GenerateRequest(text="x", group=CallGroup(id="a", num_calls=1)), "group.num_calls"),
    (GenerateRequest(text="x", group=CallGroup(id="a", num_calls=5)), "group.num_calls"),
    (GenerateRequest(text="x", group=CallGroup(id="a", num_calls=2, index=2)), "group.index"),
    (GenerateRequest(text="x", top_logprobs=102), "top_logprobs"),
    (GenerateRequest(text="x", time_limit=Duration()), "time_limit"),
    (GenerateRequest(text="x", time_limit=Duration(seconds=-1)), "time_limit"),
    (GenerateRequest(text="x", time_limit=Duration(seconds=1, nanos=-1)), "time_limit"),
    (GenerateRequest(text="x", stop=["s"] * 257), "stop"),
    (GenerateRequest(text="x", stop=["s" * 4097]), "stop[0]"),
    (GenerateRequest(text="x", annotation="s" * 4097), "annotation"),
    (GenerateRequest(text="x", preserved_tokens=[1] * 65_537), "preserved_tokens"),
    (
        GenerateRequest(
            text="x",
            grammar="g",
            grammar_triggers=[generation_pb2.GrammarTrigger(token_id=1)] * 257,
        ),
        "grammar_triggers",
    ),
    (
        GenerateRequest(
            text="x",
            sampling=SamplingParams(
                samplers=generation_pb2.SamplerChain(samplers=[generation_pb2.SAMPLER_TOP_K] * 65)
            ),
        ),
        "sampling.samplers.samplers",
    ),
    (
        GenerateRequest(
            text="x",
            sampling=SamplingParams(
                dry_sequence_breakers=common_pb2.StringList(values=["s"] * 257)
            ),
        ),
        "sampling.dry_sequence_breakers.values",
    ),
    (
        GenerateRequest(
            text="x",
            sampling=SamplingParams(
                dry_sequence_breakers=common_pb2.StringList(values=["s" * 40] * 13)
            ),
        ),
        "sampling.dry_sequence_breakers.values",
    ),
    (GenerateRequest(text="x", grammar_lazy=True), "grammar_lazy"),
    (
        GenerateRequest(text="x", grammar="g", grammar_triggers=[generation_pb2.GrammarTrigger()]),
        "grammar_triggers[0]",
    ),
    (
        GenerateRequest(text="x", reasoning=generation_pb2.ReasoningParams(budget_tokens=-2)),
        "reasoning.budget_tokens",
    ),
    (
        GenerateRequest(
            text="x",
            sampling=SamplingParams(dry_sequence_breakers=common_pb2.StringList(values=["s" * 41])),
        ),
        "sampling.dry_sequence_breakers.values[0]",
    ),
    (
        GenerateRequest(text="x", sampling=SamplingParams(logit_bias={3: math.inf})),
        "sampling.logit_bias[3]",
    ),
    (
        GenerateRequest(
            text="x",
            sampling=SamplingParams(
                samplers=generation_pb2.SamplerChain(samplers=cast("Any", [0]))
            ),
        ),
        "sampling.samplers.samplers[0]",
    ),
    (
        GenerateRequest(
            text="x",
            adapters=common_pb2.AdapterScales(scales=[common_pb2.AdapterScale(scale=1)]),
        ),
        "adapters.scales[0].adapter_id",
    ),
    (
        GenerateRequest(
            text="x",
            adapters=common_pb2.AdapterScales(scales=[common_pb2.AdapterScale(adapter_id=1)]),
        ),
        "adapters.scales[0].scale",
    ),
]


@pytest.mark.parametrize(("request_", "field"), BAD)
async def test_other_bad_fields_are_named(request_: GenerateRequest, field: str) -> None:
    async with serving() as it:
        failed = await failure(it.collect(request_))
    assert failed.reason == "INVALID_FIELD"
    assert field in failed.fields


async def test_minus_infinity_is_a_bias_that_forbids() -> None:
    async with serving() as it:
        plain = await it.collect(GenerateRequest(text="x", max_tokens=1))
        forbidden = {plain[1].chunk.token_id: -math.inf}
        sampling = SamplingParams(logit_bias=forbidden)
        other = await it.collect(GenerateRequest(text="x", max_tokens=1, sampling=sampling))
    assert other[1].chunk.token_id not in forbidden


KWARGS = ["[1]", "{", '{"a":NaN}', "[" * 100_000, '{"a":' * 100_000, '{"enable_thinking":"yes"}']


@pytest.mark.parametrize("kwargs", KWARGS)
async def test_template_arguments_that_are_no_json_object(kwargs: str) -> None:
    chat = common_pb2.ChatPrompt()
    chat.CopyFrom(CHAT)
    chat.template_kwargs_json = kwargs
    async with serving() as it:
        failed = await failure(it.collect(GenerateRequest(chat=chat)))
    assert failed.fields == ["chat.template_kwargs_json"]
    assert failed.size <= 6 * 1024


async def test_a_million_biases_are_refused_by_number() -> None:
    request = GenerateRequest(text="x")
    request.sampling.logit_bias.update(dict.fromkeys(range(1_000_000), 1.0))
    async with serving() as it:
        failed = await failure(it.collect(request))
    assert failed.fields == ["sampling.logit_bias"]
    assert "1000000 entries, limit 101" in failed.text


def test_the_best_tokens_that_are_listed_are_bounded() -> None:
    limits = Limits(num_slots=1, vocab_size=50_000, context_tokens=64)
    check_generate(GenerateRequest(text="x", top_logprobs=1024), limits)
    with pytest.raises(InvalidField, match=r"top_logprobs: 1025 .* 1024"):
        check_generate(GenerateRequest(text="x", top_logprobs=1025), limits)


@pytest.mark.parametrize("seed", range(8))
async def test_mutated_messages_never_reach_a_bug(seed: int) -> None:
    rng = random.Random(seed)
    async with serving() as it:
        for rpc in RPCS:
            for _ in range(250):
                data = mutated(rich(rpc).SerializeToString(), rng)
                failed = await rpc.call(it.channel, data)
                if failed is not None:
                    assert failed.code() in HONEST, (rpc.name, data, failed.details())
                    assert read_failure(failed).reason, (rpc.name, data)
        assert (await it.collect(GenerateRequest(text="x", max_tokens=1)))[-1].HasField("finished")
        assert it.is_clean()


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\x08")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) or 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[at : at + rng.randint(1, 4)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 4))
            case _:
                changed += changed[at:]
        changed = changed or bytearray(b"\x08")
    return bytes(changed)


def rich(rpc: Rpc) -> Message:
    """A request with something in many fields, for the mutations to meet."""
    request = rpc.request()
    if isinstance(request, generation_pb2.GenerateRequest):
        request.stop.append("zz")
        request.sampling.temperature = 0.5
        request.sampling.logit_bias[3] = 1.0
        request.adapters.SetInParent()
        request.time_limit.seconds = 5
        request.preserved_tokens.append(3)
    if isinstance(request, rebuild_pb2.RebuildRequest):
        request.drain_timeout.seconds = 1
    if isinstance(request, tokenization_pb2.ApplyChatTemplateRequest):
        request.chat.template_kwargs_json = json.dumps({"a": [1, {"b": None}]})
        request.chat.tools.add(name="f", parameters_json="{}")
    return request

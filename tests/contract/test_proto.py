"""The contracts: linted, documented, generated from what lies beside them, in step with the engine."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from kvarts.v1 import (
    error_reason_pb2,
    generation_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
)

from engine import errors, requests, types
from engine.adapters import errors as adapter_errors
from service import swap_errors, validate, validate_sampling
from service.errors import ERROR_TABLE

_PROTO = Path(__file__).parents[2] / "proto"
_FILES = sorted(path.stem for path in (_PROTO / "kvarts" / "v1").glob("*.proto"))

_NUMBERS = {
    FieldDescriptor.CPPTYPE_FLOAT,
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}


def _buf(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Runs the `buf` of this environment, which needs no network for local modules."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("buf", path=path)
    assert program is not None, "buf is missing: install the extra 'dev'"
    return subprocess.run([program, *arguments], cwd=_PROTO, capture_output=True, check=False)


def _loaded(stem: str) -> FileDescriptor:
    module = importlib.import_module(f"kvarts.v1.{stem}_pb2")
    return module.DESCRIPTOR


def _nested(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for inner in message.nested_types:
        yield from _nested(inner)


def _messages() -> Iterator[Descriptor]:
    for stem in _FILES:
        for message in _loaded(stem).message_types_by_name.values():
            yield from _nested(message)


def _fields() -> Iterator[FieldDescriptor]:
    for message in _messages():
        if not message.GetOptions().map_entry:
            yield from message.fields


def _values(descriptor: EnumDescriptor, prefix: str) -> set[str]:
    """The names of an enum without its prefix and without the zero value."""
    names = {name.removeprefix(prefix) for name in descriptor.values_by_name}
    return names - {"UNSPECIFIED"}


def _without_generated(proto: descriptor_pb2.FileDescriptorProto) -> bytes:
    """A file's declarations alone: compilers differ in whether they add positions and JSON names."""
    proto.ClearField("source_code_info")
    proto.DiscardUnknownFields()
    pending = list(proto.message_type)
    while pending:
        message = pending.pop()
        pending.extend(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")
    return proto.SerializeToString(deterministic=True)


def test_buf_lint_finds_nothing() -> None:
    # STANDARD, and COMMENTS: every message, field, enum, value, oneof, service and RPC has one.
    result = _buf("lint")

    assert result.returncode == 0, result.stdout.decode()


def test_lint_rules_include_comments() -> None:
    rules = _buf("config", "ls-lint-rules", "--configured-only").stdout.decode()

    for rule in ("FIELD", "MESSAGE", "ENUM", "ENUM_VALUE", "ONEOF", "RPC", "SERVICE"):
        assert f"COMMENT_{rule} " in rules


def test_buf_format_changes_nothing() -> None:
    result = _buf("format", "--diff", "--exit-code")

    assert result.returncode == 0, result.stdout.decode()


def test_stubs_are_those_of_the_proto_files() -> None:
    result = _buf("build", "--exclude-imports", "-o", "-")
    assert result.returncode == 0, result.stderr.decode()
    built = descriptor_pb2.FileDescriptorSet.FromString(result.stdout)

    assert {file.name for file in built.file} == {f"kvarts/v1/{stem}.proto" for stem in _FILES}
    for file in built.file:
        stub = descriptor_pb2.FileDescriptorProto()
        _loaded(Path(file.name).stem).CopyToProto(stub)
        assert _without_generated(stub) == _without_generated(file), f"{file.name}: stubs are stale"


@pytest.mark.parametrize("stem", _FILES)
def test_typed_stubs_lie_beside_each_file(stem: str) -> None:
    folder = Path(_loaded(stem).name).parent

    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
        assert (_PROTO / folder / f"{stem}{suffix}").is_file()


def test_all_services_are_there() -> None:
    services = {
        name: set(service.methods_by_name)
        for stem in _FILES
        for name, service in _loaded(stem).services_by_name.items()
    }

    assert services == {
        "GenerationService": {"Generate"},
        "TokenizationService": {
            "Tokenize",
            "Detokenize",
            "ApplyChatTemplate",
            "ConvertJsonSchema",
        },
        "EmbeddingService": {"Embed"},
        "ModelService": {
            "GetModel",
            "GetServerInfo",
            "GetMetrics",
            "WatchModel",
            "LoadModel",
        },
        "SlotService": {
            "ListSlots",
            "SaveSlot",
            "RestoreSlot",
            "EraseSlot",
            "ListSlotFiles",
            "DeleteSlotFile",
        },
        "LoraService": {"ListAdapters", "SetAdapterScales", "LoadAdapter", "UnloadAdapter"},
        "RebuildService": {"GetPools", "Rebuild"},
    }


def _comment(stem: str, declaration: str) -> str:
    """The comment in front of a declaration, on one line."""
    text = (_PROTO / "kvarts" / "v1" / f"{stem}.proto").read_text()
    match = re.search(rf"((?:^ *//.*\n)+) *{re.escape(declaration)}", text, re.MULTILINE)
    assert match is not None, declaration
    return " ".join(line.strip().removeprefix("//").strip() for line in match[1].splitlines())


@pytest.mark.parametrize(
    ("stem", "declaration", "limits"),
    [
        ("generation", "message GenerateRequest", [validate.MAX_INT32]),
        ("generation", "message SamplingParams", [validate.MAX_INT32]),
        ("generation", "repeated string stop = 7", [validate.MAX_STOPS, validate.MAX_STOP_BYTES]),
        ("generation", "repeated uint32 preserved_tokens = 22", [validate.MAX_PRESERVED_TOKENS]),
        ("generation", "repeated GrammarTrigger grammar_triggers", [validate.MAX_TRIGGERS]),
        ("generation", "repeated Sampler samplers", [validate_sampling.MAX_SAMPLERS]),
        ("generation", "optional uint32 top_logprobs = 14", [validate.MAX_TOP_LOGPROBS]),
        (
            "generation",
            "StringList dry_sequence_breakers",
            [
                validate_sampling.MAX_BREAKERS,
                validate_sampling.MAX_BREAKER_BYTES,
                validate_sampling.MAX_BREAKER_BYTES_IN_ALL,
            ],
        ),
        ("generation", "string annotation", [validate.MAX_ANNOTATION_BYTES]),
        ("embedding", "repeated EmbedInput inputs", [validate.MAX_INPUTS]),
        ("slot", "uint32 page_size", [validate.MAX_PAGE_SIZE]),
        ("lora", "string name = 1;\n  // Path", [validate.MAX_NAME_BYTES]),
        ("lora", "string path = 2", [validate.MAX_PATH_BYTES]),
    ],
)
def test_every_limit_is_told(stem: str, declaration: str, limits: list[int]) -> None:
    numbers = set(re.findall(r"\d+", _comment(stem, declaration)))
    assert {str(limit) for limit in limits} <= numbers


def test_what_streams() -> None:
    streams = [
        method.full_name
        for stem in _FILES
        for service in _loaded(stem).services_by_name.values()
        for method in service.methods
        if method.server_streaming or method.client_streaming
    ]

    assert streams == [
        "kvarts.v1.GenerationService.Generate",
        "kvarts.v1.ModelService.WatchModel",
        "kvarts.v1.ModelService.LoadModel",
    ]


def test_every_engine_reason_is_an_error_reason() -> None:
    known = _values(error_reason_pb2.ErrorReason.DESCRIPTOR, "ERROR_REASON_")
    raised = {
        value.reason
        for value in [
            *vars(errors).values(),
            *vars(adapter_errors).values(),
            *vars(swap_errors).values(),
        ]
        if isinstance(value, type) and issubclass(value, errors.EngineError)
    }

    assert len(raised) > 10
    assert raised <= known


def test_every_reason_of_the_error_table_is_an_error_reason() -> None:
    assert set(ERROR_TABLE) <= _values(error_reason_pb2.ErrorReason.DESCRIPTOR, "ERROR_REASON_")


def test_required_ids_have_presence() -> None:
    # Zero is a legal id: without presence, an empty EraseSlotRequest would erase slot 0.
    ids = {
        message.name: field
        for message in _messages()
        for field in message.fields
        if field.name == "adapter_id"
        or (field.name == "slot_id" and message.name.endswith("Request"))
    }

    assert set(ids) == {
        "GenerateRequest",
        "SaveSlotRequest",
        "RestoreSlotRequest",
        "EraseSlotRequest",
        "AdapterScale",
        "UnloadAdapterRequest",
    }
    assert [name for name, field in ids.items() if not field.has_presence] == []


@pytest.mark.parametrize(
    "message",
    [generation_pb2.SamplingParams.DESCRIPTOR, rebuild_pb2.PoolSizes.DESCRIPTOR],
    ids=lambda message: message.name,
)
def test_numbers_whose_zero_means_something_have_presence(message: Descriptor) -> None:
    numbers = [field for field in message.fields if field.cpp_type in _NUMBERS]

    assert numbers
    assert [field.name for field in numbers if not field.has_presence] == []


def test_sizes_and_counts_have_the_agreed_types() -> None:
    wrong = [
        field.full_name
        for field in _fields()
        if (
            field.name.endswith("_bytes")
            and field.type
            not in {
                FieldDescriptor.TYPE_UINT64,
                FieldDescriptor.TYPE_INT64,
            }
        )
        or (
            field.name.endswith("_id")
            and field.type
            not in {
                FieldDescriptor.TYPE_UINT32,
                FieldDescriptor.TYPE_UINT64,
                FieldDescriptor.TYPE_STRING,
            }
        )
    ]

    assert wrong == []


def test_a_budget_can_be_negative() -> None:
    budgets = [field for field in _fields() if field.name == "budget_bytes"]

    assert budgets
    assert {field.type for field in budgets} == {FieldDescriptor.TYPE_INT64}


@pytest.mark.parametrize(
    ("engine_enum", "descriptor", "prefix"),
    [
        (requests.Sampler, generation_pb2.Sampler.DESCRIPTOR, "SAMPLER_"),
        (requests.Mirostat, generation_pb2.Mirostat.DESCRIPTOR, "MIROSTAT_"),
        (types.FinishReason, generation_pb2.FinishReason.DESCRIPTOR, "FINISH_REASON_"),
        (types.CacheSource, generation_pb2.CacheSource.DESCRIPTOR, "CACHE_SOURCE_"),
        (types.SlotState, slot_pb2.SlotState.DESCRIPTOR, "SLOT_STATE_"),
        (types.PoolKind, rebuild_pb2.PoolKind.DESCRIPTOR, "POOL_KIND_"),
    ],
)
def test_enums_agree_with_the_engine(
    engine_enum: type[enum.Enum], descriptor: EnumDescriptor, prefix: str
) -> None:
    assert _values(descriptor, prefix) == {member.name for member in engine_enum}


def _renamed(name: str, names: dict[str, str]) -> str:
    """The contract's name of an engine field: seconds become Durations."""
    if name in names:
        return names[name]
    return name.removesuffix("_s") + "_duration" if name.endswith("_s") else name


@pytest.mark.parametrize(
    ("engine_type", "descriptor", "names", "engine_only"),
    [
        (requests.SamplingParams, generation_pb2.SamplingParams.DESCRIPTOR, {}, set[str]()),
        (
            requests.Request,
            generation_pb2.GenerateRequest.DESCRIPTOR,
            {"prompt": "tokens", "time_limit_s": "time_limit", "progress": "return_progress"},
            # A deadline is the call's, a tenant the key's, a group the call; the echo is
            # `annotation`.
            # The constraint's parts are fields of their own. A prompt is only warmed by SaveSlot,
            # and only pooled by Embed.
            {"deadline_s", "tenant", "group", "constraint", "is_warming", "pooling"},
        ),
        (
            types.Started,
            generation_pb2.Started.DESCRIPTOR,
            {"no_reuse": "no_reuse_reason"},
            set[str](),
        ),
        (
            types.Progress,
            generation_pb2.Progress.DESCRIPTOR,
            {
                "total": "total_tokens",
                "cached": "cached_tokens",
                "processed": "processed_tokens",
                "elapsed_s": "elapsed",
            },
            set[str](),
        ),
        (
            types.Chunk,
            generation_pb2.Chunk.DESCRIPTOR,
            {"decode_s": "decode_elapsed"},
            set[str](),
        ),
        (
            types.Finished,
            generation_pb2.Finished.DESCRIPTOR,
            {"reason": "finish_reason"},
            set[str](),
        ),
        (
            types.SlotInfo,
            slot_pb2.Slot.DESCRIPTOR,
            {"slot_id": "id", "pages": "num_pages", "request": "settings"},
            set[str](),
        ),
        (types.PoolInfo, rebuild_pb2.Pool.DESCRIPTOR, {}, set[str]()),
        (types.Counters, model_pb2.Counters.DESCRIPTOR, {}, set[str]()),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_messages_carry_every_field_of_the_engine(
    engine_type: type, descriptor: Descriptor, names: dict[str, str], engine_only: set[str]
) -> None:
    expected = {
        _renamed(field.name, names)
        for field in dataclasses.fields(engine_type)
        if field.name not in engine_only
    }

    assert expected - set(descriptor.fields_by_name) == set()

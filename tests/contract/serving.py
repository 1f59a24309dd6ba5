"""A real gRPC server over the real engine on a fake runner, and a client channel to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from kvarts.v1 import (
    embedding_pb2_grpc,
    generation_pb2_grpc,
    lora_pb2_grpc,
    model_pb2_grpc,
    rebuild_pb2_grpc,
    slot_pb2_grpc,
    tokenization_pb2_grpc,
)

from engine.engine import Engine
from engine.errors import TemplateError
from engine.types import EngineConfig
from service.defaults import GenerationDefaults
from service.loaded import LoadedModel, ModelFacts, ModelNames
from service.options import ModelSource, ServiceOptions
from service.server import Server
from tests.fakes import FakeTokenizer

CONFIG = EngineConfig(context_tokens=256, num_slots=4, page_tokens=16)
FACTS = ModelFacts(
    architecture="fake",
    vocab_type=1,
    context_train_tokens=1024,
    embedding_size=8,
    num_layers=2,
    num_params=1000,
    size_bytes=4000,
    name="Fake",
    ftype="all F32",
    special_tokens={"bos": (0, "<s>"), "eos": (1, "</s>")},
    chat_template="{fake}",
)


class FakeTemplate:
    """Renders `role:content|` per message, and what else it was given in brackets."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        if any(message["content"] == "boom" for message in messages):
            raise TemplateError("it said boom")
        turns = "".join(f"{m['role']}:{m['content']}|" for m in messages)
        shown = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        named = "".join(f"[{key}={value}]" for key, value in sorted((extra or {}).items()))
        return "<s>" + shown + named + turns + ("assistant:" if add_generation_prompt else "")


def options(**changes: Any) -> ServiceOptions:
    """Options of a server on a free port; no file is ever read."""
    source = ModelSource(
        path="fake.gguf",
        hf_repo=None,
        hf_file=None,
        is_offline=True,
        cache_dir=Path("unused"),
        hub_dir=Path("unused"),
    )
    return replace(ServiceOptions(model=source, engine=CONFIG, grpc_port=0), **changes)


def fake_model(engine: Engine, **changes: Any) -> LoadedModel:
    """What the loader would hand over."""
    model = LoadedModel(
        engine=engine,
        tokenizer=FakeTokenizer(),
        template=FakeTemplate(),
        names=ModelNames(model_id="fake", path="fake.gguf"),
        facts=FACTS,
        defaults=GenerationDefaults(),
    )
    return replace(model, **changes)


@dataclass
class Serving:
    """A server that is ready, its engine, and a channel."""

    server: Server
    engine: Engine
    channel: grpc.aio.Channel
    options: ServiceOptions
    stubs: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        channel = self.channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.tokenization = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.model = model_pb2_grpc.ModelServiceStub(channel)
        self.slots = slot_pb2_grpc.SlotServiceStub(channel)
        self.lora = lora_pb2_grpc.LoraServiceStub(channel)
        self.rebuild = rebuild_pb2_grpc.RebuildServiceStub(channel)

"""The gateway's side of the connection: one channel, the stubs, and the calls' credentials."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from kvarts.v1 import (
    embedding_pb2_grpc,
    generation_pb2_grpc,
    lora_pb2_grpc,
    model_pb2_grpc,
    rebuild_pb2_grpc,
    slot_pb2_grpc,
    tokenization_pb2_grpc,
)

from gateway.options import GatewayOptions
from gateway.rpc_errors import from_rpc

if TYPE_CHECKING:
    from kvarts.v1.embedding_pb2_grpc import EmbeddingServiceAsyncStub
    from kvarts.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from kvarts.v1.lora_pb2_grpc import LoraServiceAsyncStub
    from kvarts.v1.model_pb2_grpc import ModelServiceAsyncStub
    from kvarts.v1.rebuild_pb2_grpc import RebuildServiceAsyncStub
    from kvarts.v1.slot_pb2_grpc import SlotServiceAsyncStub
    from kvarts.v1.tokenization_pb2_grpc import TokenizationServiceAsyncStub

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

# What metadata takes.
_SENDABLE = re.compile(r"[ -~]+")

# A token list of a full context, a long prompt's text, a vocabulary's worth of biases.
_MAX_MESSAGE_BYTES = 128 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A service that restarts must be found again well within a client's patience.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True)
class Service:
    """The stubs over one channel; whoever connected closes it."""

    channel: grpc.aio.Channel
    generation: GenerationServiceAsyncStub
    tokenization: TokenizationServiceAsyncStub
    model: ModelServiceAsyncStub
    embedding: EmbeddingServiceAsyncStub
    slots: SlotServiceAsyncStub
    lora: LoraServiceAsyncStub
    rebuild: RebuildServiceAsyncStub


def connect(options: GatewayOptions) -> Service:
    """Opens the channel; it dials when the first call is made.

    Raises:
        OSError: a certificate file cannot be read.
    """
    return over(_channel(options))


def over(channel: grpc.aio.Channel) -> Service:
    """The stubs over a channel that is open already."""
    return Service(
        channel=channel,
        generation=generation_pb2_grpc.GenerationServiceStub(channel),
        tokenization=tokenization_pb2_grpc.TokenizationServiceStub(channel),
        model=model_pb2_grpc.ModelServiceStub(channel),
        embedding=embedding_pb2_grpc.EmbeddingServiceStub(channel),
        slots=slot_pb2_grpc.SlotServiceStub(channel),
        lora=lora_pb2_grpc.LoraServiceStub(channel),
        rebuild=rebuild_pb2_grpc.RebuildServiceStub(channel),
    )


async def answer(call: Awaitable[T]) -> T:
    """Awaits a unary call.

    Raises:
        ApiError: the service refused it or is gone.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error


def credentials(key: str | None) -> Metadata:
    """The metadata that carries an API key; none that no metadata can carry is a key of anybody's."""
    return (("authorization", f"Bearer {key}"),) if key and _SENDABLE.fullmatch(key) else ()


def _channel(options: GatewayOptions) -> grpc.aio.Channel:
    if options.service_ca_file is None:
        return grpc.aio.insecure_channel(options.service, options=_CHANNEL_OPTIONS)
    tls = grpc.ssl_channel_credentials(
        root_certificates=Path(options.service_ca_file).read_bytes(),
        private_key=_read_or_none(options.service_key_file),
        certificate_chain=_read_or_none(options.service_cert_file),
    )
    return grpc.aio.secure_channel(options.service, tls, options=_CHANNEL_OPTIONS)


def _read_or_none(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path is not None else None

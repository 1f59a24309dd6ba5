"""Every RPC of the package, from its descriptors, with a request that is valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from kvarts.v1 import (
    common_pb2,
    embedding_pb2,
    generation_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
    tokenization_pb2,
)

FILES = (
    embedding_pb2,
    generation_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
    tokenization_pb2,
)
CHAT = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="x")])
VALID: dict[str, Message] = {
    "Generate": generation_pb2.GenerateRequest(text="x", max_tokens=1),
    "Tokenize": tokenization_pb2.TokenizeRequest(text="x"),
    "Detokenize": tokenization_pb2.DetokenizeRequest(token_ids=[5]),
    "ApplyChatTemplate": tokenization_pb2.ApplyChatTemplateRequest(chat=CHAT),
    "Embed": embedding_pb2.EmbedRequest(inputs=[embedding_pb2.EmbedInput(text="x")]),
    "SaveSlot": slot_pb2.SaveSlotRequest(slot_id=0, filename="a"),
    "RestoreSlot": slot_pb2.RestoreSlotRequest(slot_id=0, filename="a"),
    "EraseSlot": slot_pb2.EraseSlotRequest(slot_id=0),
    "DeleteSlotFile": slot_pb2.DeleteSlotFileRequest(filename="a"),
    "SetAdapterScales": lora_pb2.SetAdapterScalesRequest(scales=common_pb2.AdapterScales()),
    "LoadAdapter": lora_pb2.LoadAdapterRequest(name="a", path="a.gguf"),
    "UnloadAdapter": lora_pb2.UnloadAdapterRequest(adapter_id=0),
    "LoadModel": model_pb2.LoadModelRequest(path="a.gguf"),
    "Rebuild": rebuild_pb2.RebuildRequest(target=rebuild_pb2.PoolSizes(kv_pages=64)),
}


@dataclass(frozen=True)
class Rpc:
    """One RPC."""

    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.name}"

    def request(self) -> Message:
        """Returns a fresh valid request; where none is listed the empty one is valid."""
        empty = message_factory.GetMessageClass(self.descriptor.input_type)()
        if self.name in VALID:
            empty.CopyFrom(VALID[self.name])
        return empty

    async def call(
        self, channel: grpc.aio.Channel, data: bytes, metadata: tuple[tuple[str, str], ...] = ()
    ) -> grpc.aio.AioRpcError | None:
        """Sends bytes as a request and reads the whole answer; returns how it failed."""
        untyped = cast("Any", channel)
        try:
            if self.descriptor.server_streaming:
                async for _ in untyped.unary_stream(self.path)(data, metadata=metadata):
                    if self.name == "WatchModel":
                        break  # it goes on for as long as the server does
            else:
                await untyped.unary_unary(self.path)(data, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error
        return None


RPCS = [
    Rpc(method)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

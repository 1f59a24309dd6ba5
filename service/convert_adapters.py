"""Adapters as messages; see `service.convert`, of which this is a part."""

from __future__ import annotations

from kvarts.v1 import lora_pb2

from engine.types import AdapterInfo
from service.loaded import Tokenizer


def from_adapter(info: AdapterInfo, tokenizer: Tokenizer) -> lora_pb2.Adapter:
    """One loaded adapter, with the text of its invocation."""
    message = lora_pb2.Adapter(
        id=info.adapter_id,
        name=info.name,
        path=info.path,
        rank=info.rank,
        scale=info.scale,
        size_bytes=info.size_bytes,
        active_requests=info.active_requests,
        task_name=info.task_name,
        prompt_prefix=info.prompt_prefix,
        alora_invocation_tokens=info.invocation_tokens,
        targets=info.targets,
        content_hash=info.digest.hex(),
        is_unloading=info.is_leaving,
    )
    if info.alpha is not None:
        message.alpha = info.alpha
    if info.invocation_tokens:
        text = tokenizer.decode(info.invocation_tokens, render_special=True)
        message.alora_invocation_string = text.decode(errors="replace")
    return message

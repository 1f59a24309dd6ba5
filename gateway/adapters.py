"""LoRA adapters over HTTP: the peer's leniency towards ids that are not loaded.

The peer drops such ids without a word. They are dropped here too, so that its clients get its
answers, but the answer says so in a header and the log in a line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvarts.v1 import common_pb2, lora_pb2

from gateway.service import Metadata, Service, answer

IGNORED_HEADER = "x-kvarts-ignored"
_LOG = logging.getLogger("gateway")
_MAX_SHOWN = 16

Scales = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class KnownAdapters:
    """A set as a client named it: the loaded adapters of it, and the ids that are none."""

    scales: Scales = ()
    ignored: Sequence[int] = ()

    @property
    def message(self) -> common_pb2.AdapterScales:
        """The set as the service takes it."""
        return common_pb2.AdapterScales(
            scales=[
                common_pb2.AdapterScale(adapter_id=adapter, scale=scale)
                for adapter, scale in self.scales
            ]
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells the client of ids that were ignored."""
        if not self.ignored:
            return {}
        shown = ", ".join(map(str, self.ignored[:_MAX_SHOWN]))
        rest = len(self.ignored) - _MAX_SHOWN
        more = f", {rest} more" if rest > 0 else ""
        return {IGNORED_HEADER: f"adapters that are not loaded: {shown}{more}"}


async def known_adapters(service: Service, named: Scales, metadata: Metadata) -> KnownAdapters:
    """Sorts what a client named into what is loaded and what is not.

    Raises:
        ApiError: the service refused the call or is gone.
    """
    if not named:
        return KnownAdapters()
    request = lora_pb2.ListAdaptersRequest()
    reply = await answer(service.lora.ListAdapters(request, metadata=metadata))
    loaded = {adapter.id for adapter in reply.adapters if not adapter.is_unloading}
    known = KnownAdapters(
        tuple(entry for entry in named if entry[0] in loaded),
        tuple(adapter for adapter, _ in named if adapter not in loaded),
    )
    for text in known.headers.values():
        _LOG.warning("ignored: %s", text)
    return known

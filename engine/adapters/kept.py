"""Loaded adapters as they are taken over to another engine: their ids, scales and files.

Their content is read again there, because it has to be checked against another model's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.errors import AdapterFileInvalid
from engine.adapters.fit import TargetModel
from engine.adapters.loaded import LoadedAdapter, NewAdapter
from engine.adapters.source import read_adapter
from engine.types import EngineConfig


@dataclass(frozen=True)
class KeptAdapters:
    """What an engine has loaded, by rising id, and the id that it would give next."""

    adapters: tuple[LoadedAdapter, ...]
    capacity: AdapterCapacity
    next_id: int

    def config(self, config: EngineConfig) -> EngineConfig:
        """Returns a layout with the same room, and none of the adapters that a start would load."""
        rank = config.max_adapter_rank
        if rank is None and self.capacity.count:
            rank = self.capacity.rank
        return replace(
            config,
            adapters=(),
            max_adapters=self.capacity.count,
            max_adapter_rank=rank,
            adapts_experts=self.capacity.has_experts,
        )

    def read(self, model: TargetModel) -> Sequence[NewAdapter]:
        """Reads and checks each again, for another model.

        Raises:
            EngineError: As `engine.adapters.source.read_adapter`, or AdapterFileInvalid: the file
                holds something else than was loaded, so that nobody asked for it.
        """
        return [self._read(adapter, model) for adapter in self.adapters]

    def _read(self, adapter: LoadedAdapter, model: TargetModel) -> NewAdapter:
        content = read_adapter(adapter.source, model, self.capacity.rank)
        if content.facts.digest != adapter.facts.digest:
            raise AdapterFileInvalid(adapter.path, "its content has changed since it was loaded")
        return NewAdapter(
            adapter.name, adapter.path, adapter.scale, content, adapter.source, adapter.adapter_id
        )

"""The adapters that are loaded at start, which say how large the banks are unless a flag does.

They are read by the same code as those that are loaded later. One that cannot be attached ends the
start: a server must never answer with the base model in an adapter's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.fit import TargetModel
from engine.adapters.loaded import NewAdapter
from engine.adapters.source import read_adapter
from engine.errors import InvalidField
from engine.types import EngineConfig, StartAdapter

MAX_ADAPTERS = 256
_SPARE_RANK = 16  # of places that are free at the start, unless a flag says otherwise
MAX_RANK = 512
"""What the native kernel has room for."""


def read_start_adapters(config: EngineConfig, model: TargetModel) -> list[NewAdapter]:
    """Reads and checks the adapters of a configuration, in order.

    Raises:
        EngineError: As `engine.adapters.source.read_adapter`, or InvalidField: they are more than
            may be loaded.
    """
    _check(config)
    limit = MAX_RANK if config.max_adapter_rank is None else config.max_adapter_rank
    names = _distinct(config.adapters)
    return [
        _read(name, start, model, limit) for name, start in zip(names, config.adapters, strict=True)
    ]


def _read(name: str, start: StartAdapter, model: TargetModel, limit: int) -> NewAdapter:
    source = Path(start.path)
    content = read_adapter(source, model, limit)
    return NewAdapter(name, start.path, start.scale, content, source.absolute())


def capacity_for(
    config: EngineConfig, adapters: Sequence[NewAdapter], model: TargetModel
) -> AdapterCapacity:
    """Returns the banks' size: as configured, else what the adapters of the start need."""
    count = len(adapters) if config.max_adapters is None else config.max_adapters
    rank = config.max_adapter_rank
    if rank is None:
        least = _SPARE_RANK if count > len(adapters) else 1
        rank = max([least, *(adapter.content.facts.rank for adapter in adapters)])
    targets = (name for adapter in adapters for name in adapter.content.pairs)
    needs_experts = any(len(model.matrices[name]) > 2 for name in targets)
    return AdapterCapacity(count, rank, config.adapts_experts or needs_experts)


def _check(config: EngineConfig) -> None:
    most, rank = config.max_adapters, config.max_adapter_rank
    if most is not None and not 0 <= most <= MAX_ADAPTERS:
        raise InvalidField("max_adapters", f"must be in [0, {MAX_ADAPTERS}], got {most}")
    if rank is not None and not 1 <= rank <= MAX_RANK:
        raise InvalidField("max_adapter_rank", f"must be in [1, {MAX_RANK}], got {rank}")
    named = len(config.adapters)
    limit = MAX_ADAPTERS if most is None else most
    if named > limit:
        raise InvalidField("max_adapters", f"{named} adapters are to be loaded, {limit} may be")


def _distinct(adapters: Sequence[StartAdapter]) -> list[str]:
    """Their paths as names; one that was named before gets a number."""
    names: list[str] = []
    for start in adapters:
        name, number = start.path, 2
        while name in names:
            name, number = f"{start.path}#{number}", number + 1
        names.append(name)
    return names

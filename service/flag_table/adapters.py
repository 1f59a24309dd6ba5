"""LoRA adapters: which are loaded at start, and the room for those that come later."""

from __future__ import annotations

import math

from engine.adapters.start import MAX_ADAPTERS, MAX_RANK
from engine.types import StartAdapter
from service.flag_values import SWITCH, BadValue, Kind, comma_list, integer, path
from service.flags import Flag, Scope

_GROUP = "Adapters"
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_FILES = comma_list()


def _parse_plain(text: str) -> tuple[StartAdapter, ...]:
    return tuple(StartAdapter(name) for name in _FILES.parse(text))


def _parse_scaled(text: str) -> tuple[StartAdapter, ...]:
    return tuple(_scaled(item) for item in _FILES.parse(text))


def _scaled(item: str) -> StartAdapter:
    name, colon, number = item.rpartition(":")
    try:
        scale = float(number) if colon and name else math.nan
    except ValueError:
        scale = math.nan
    if not abs(scale) <= _MAX_FLOAT32:
        raise BadValue(f"{item[:80]!r} must be FNAME:SCALE with a finite number")
    return StartAdapter(name, scale)


ADAPTERS = (
    Flag(
        ("--lora",),
        Kind("FNAME,...", _parse_plain),
        "adapters",
        "adapters to load: GGUF files, or folders of peft; ids count from 0 in the order of these "
        "and of --lora-scaled",
        default=(),
        repeats=True,
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--lora-scaled",),
        Kind("FNAME:SCALE,...", _parse_scaled),
        "adapters",
        "the same, each with its scale",
        default=(),
        repeats=True,
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--lora-init-without-apply",),
        SWITCH,
        "starts_without_adapters",
        "load them at scale 0, to be turned on by POST /lora-adapters or SetAdapterScales",
        default=False,
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--lora-dir",),
        path("DIR"),
        "adapter_dir",
        "folder below which LoadAdapter finds adapters, which must exist",
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--lora-max",),
        integer(0, MAX_ADAPTERS),
        "max_adapters",
        "adapters that may be loaded at once (default: those of the start, and 4 more with "
        "--lora-dir)",
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--lora-max-rank",),
        integer(1, MAX_RANK),
        "max_adapter_rank",
        "greatest rank of an adapter (default: the greatest of the start's, at least 16 where "
        "there is room for more)",
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--lora-experts",),
        SWITCH,
        "adapts_experts",
        "keep room for adapters of experts, which is large (default: only if one of the start's "
        "changes experts)",
        default=False,
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
)

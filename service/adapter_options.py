"""The adapters that the service is started with, from the command line's flags."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path

from engine.types import EngineConfig, StartAdapter
from service.flags import FlagError, Parsed

_LOG = logging.getLogger("kvarts.service")
_SPARE_ADAPTERS = 4


def with_adapters(config: EngineConfig, parsed: Parsed) -> EngineConfig:
    """Adds the adapters of the start and the room for more to a layout.

    Source: llama.cpp's --lora-init-without-apply only leaves out a first apply, and every request
    then runs at scale 1; here the scales do start at 0.
    """
    adapters: tuple[StartAdapter, ...] = tuple(chain.from_iterable(parsed["adapters"]))
    if parsed["starts_without_adapters"] and adapters:
        adapters = tuple(replace(adapter, scale=0.0) for adapter in adapters)
        _LOG.info("%d adapters start at scale 0", len(adapters))
    most = parsed["max_adapters"]
    if most is None:
        most = len(adapters) + (_SPARE_ADAPTERS if parsed["adapter_dir"] else 0)
    return replace(
        config,
        adapters=adapters,
        max_adapters=most,
        max_adapter_rank=parsed["max_adapter_rank"],
        adapts_experts=parsed["adapts_experts"],
    )


def adapter_dir(parsed: Parsed) -> str | None:
    """The folder of LoadAdapter.

    Raises:
        FlagError: It does not exist.
    """
    folder: str | None = parsed["adapter_dir"]
    if folder is not None and not Path(folder).is_dir():
        raise FlagError(f"--lora-dir {folder[:80]!r}: there is no such folder")
    return folder

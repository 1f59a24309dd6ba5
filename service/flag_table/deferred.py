"""Flags whose feature is planned but not there: they end the start, naming the feature.

A row's neutral values mean what the server does anyway, and pass.
"""

from __future__ import annotations

from typing import Any

from service.flag_values import SWITCH, TEXT, Kind, integer
from service.flags import Flag, Verdict


def _later(
    feature: str,
    *names: str,
    kind: Kind = TEXT,
    off: tuple[str, ...] = (),
    variable: str | None = None,
    neutral: tuple[Any, ...] = (),
) -> Flag:
    return Flag(
        names,
        kind,
        dest="later",
        off_names=off,
        verdict=Verdict.LATER,
        note=feature,
        variable=variable,
        neutral=(False, *neutral) if kind is SWITCH else neutral,
    )


DEFERRED = (
    _later(
        "a context limit per slot",
        "--kv-unified-per-slot",
        variable="LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    ),
    _later("sleeping when idle", "--sleep-idle-seconds", kind=integer(-1), neutral=(-1,)),
)

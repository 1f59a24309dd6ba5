"""The counters of a scrape: between two looks none of them may fall. Knows no server."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTS_UP = {"counter", "histogram"}


def read_metrics(text: str) -> dict[str, float]:
    """Every sample of the text of a scrape by its name with its labels."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = (line.rsplit(" ", 1) for line in lines)
    return {name: float(value) for name, value in pairs}


def read_counters(text: str) -> dict[str, float]:
    """Those of our own counters and histograms: the peer's are rates that each look resets."""
    kinds = [line.split(" ")[2:] for line in text.splitlines() if line.startswith("# TYPE kvarts_")]
    families = tuple(family for family, kind in kinds if kind in _COUNTS_UP)
    return {
        name: value
        for name, value in read_metrics(text).items()
        if name.startswith(families) and "_created" not in name
    }


def fallen(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each counter that is lower than it was, or gone."""
    return [
        f"{name} fell from {value:g} to {after.get(name, float('nan')):g}"
        for name, value in before.items()
        if not after.get(name, float("nan")) >= value
    ]

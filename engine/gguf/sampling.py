"""How a model's file wants to be sampled: its `general.sampling.*` keys.

What is returned lies in the ranges of `engine.requests.SamplingParams`. Knows no flag and no default:
whoever starts a server decides what comes first.

Source: llama.cpp's common_init_sampler_from_model, which reads each value by way of its decimal
text of six places, so that a float32 0.6 is 0.6 here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.gguf.metadata import Metadata
from engine.requests import Mirostat

_PREFIX = "general.sampling."
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class SamplingHints:
    """None where the file is silent. `samplers` are names as the file spells them, not empty."""

    samplers: tuple[str, ...] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


def read_sampling(metadata: Metadata) -> SamplingHints:
    """Reads what the file says.

    A value beyond the end of its range counts as that end, where the sampler does the same.

    Raises:
        ModelFileError: A key has another type, is not finite, or means nothing.
    """
    reader = _Reader(metadata)
    return SamplingHints(
        samplers=_names(metadata),
        temperature=reader.number("temp", low=0.0),
        top_k=reader.count("top_k"),
        top_p=reader.number("top_p", low=0.0, high=1.0),
        min_p=reader.number("min_p", low=0.0, high=1.0),
        xtc_probability=reader.number("xtc_probability", low=0.0, high=1.0),
        xtc_threshold=reader.number("xtc_threshold", low=0.0, high=1.0),
        repeat_last_n=reader.count("penalty_last_n"),
        repeat_penalty=reader.checked("penalty_repeat", lambda value: value > 0, "above 0"),
        mirostat=_mirostat(reader),
        mirostat_tau=reader.number("mirostat_tau", low=0.0),
        mirostat_eta=reader.number("mirostat_eta", low=0.0),
    )


class _Reader:
    """Reads numbers of whatever type, because converters do not agree on one."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def number(self, name: str, *, low: float, high: float = float("inf")) -> float | None:
        key = _PREFIX + name
        if key not in self._metadata:
            return None
        value = float(f"{self._metadata.get_float(key):.6f}")
        return min(max(value, low), high)

    def count(self, name: str) -> int | None:
        value = self.number(name, low=0, high=_MAX_COUNT)
        return None if value is None else int(value)

    def checked(self, name: str, holds: Callable[[float], bool], expected: str) -> float | None:
        value = self.number(name, low=float("-inf"))
        if value is not None and not holds(value):
            raise self._metadata.error(_PREFIX + name, f"is {value:g}, expected {expected}")
        return value


def _names(metadata: Metadata) -> tuple[str, ...] | None:
    text = metadata.get_str(_PREFIX + "sequence", "")
    return tuple(text.split(";")) if text else None


def _mirostat(reader: _Reader) -> Mirostat | None:
    versions = {mirostat.value for mirostat in Mirostat}
    value = reader.checked("mirostat", lambda number: number in versions, "0, 1 or 2")
    return None if value is None else Mirostat(int(value))

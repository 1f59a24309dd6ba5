"""The set of adapters under which one request runs: frozen at admission, never changed after.

Pure. What a set computes depends on the content of its adapters and their scales alone, so that is
what its key says, and the order in which it adds them up: neither ids nor places nor the order of
loading change a bit of a result.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.requests import AdapterScale

_TOKEN = struct.Struct("<I")
_MEMBER = struct.Struct("<32sf")


@dataclass(frozen=True)
class SetMember:
    """One adapter of a set that is not off. `scale` is a float32."""

    adapter_id: int
    place: int
    digest: bytes
    scale: float


@dataclass(frozen=True)
class EffectiveSet:
    """The adapters that are not off, in the order in which they are added up.

    `active_from` is the first position that they change; only an activated adapter's is not 0.
    """

    members: tuple[SetMember, ...] = ()
    active_from: int = 0

    @property
    def key(self) -> bytes:
        """What prefixes under this set start with: b"" if nothing changes the base model."""
        return b"".join(_MEMBER.pack(m.digest, m.scale) for m in self.members)

    @property
    def scales(self) -> tuple[AdapterScale, ...]:
        """The set as a reply echoes it, by rising id."""
        by_id = sorted(self.members, key=lambda member: member.adapter_id)
        return tuple(AdapterScale(member.adapter_id, member.scale) for member in by_id)

    @property
    def is_activated(self) -> bool:
        """Whether it is one activated adapter, which leaves the beginning of the prompt alone."""
        return bool(self.members) and self.active_from > 0

    @property
    def prefix_key(self) -> bytes:
        """Under which key tokens are found again: an activated set shares the base model's.

        That holds up to `active_from`; what follows is nobody's prefix.
        """
        return b"" if self.is_activated else self.key

    @property
    def prefix_limit(self) -> int | None:
        """How many leading tokens may be reused; None for all."""
        return self.active_from if self.is_activated else None

    def uses(self, adapter_id: int) -> bool:
        """Whether an adapter is in the set."""
        return any(member.adapter_id == adapter_id for member in self.members)

    def at(self, position: int) -> Sequence[tuple[int, float]]:
        """Returns (place, scale) of what changes the token at a position."""
        if position < self.active_from:
            return ()
        return tuple((member.place, member.scale) for member in self.members)

    def span_end(self, position: int, end: int) -> int:
        """Returns where the tokens from `position` on stop being computed alike, at most `end`."""
        return min(end, self.active_from) if position < self.active_from else end


BASE = EffectiveSet()


def split_key(key: bytes) -> tuple[tuple[bytes, float], ...]:
    """Returns the digests and scales that a key is made of."""
    return tuple(_MEMBER.iter_unpack(key))


def to_float32(value: float) -> float:
    """Rounds to float32; what is too large becomes an infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def make_set(members: Iterable[SetMember]) -> EffectiveSet:
    """Returns the set of the members that are not off."""
    active = [member for member in members if member.scale != 0]
    return EffectiveSet(tuple(sorted(active, key=lambda m: (m.digest, m.scale, m.adapter_id))))


def last_occurrence(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Returns where the last run of `wanted` begins in `tokens`; None if there is none."""
    text = b"".join(map(_TOKEN.pack, tokens))
    pattern = b"".join(map(_TOKEN.pack, wanted))
    at = text.rfind(pattern)
    # A match between two tokens is none; the next one before it may be.
    while at > 0 and at % _TOKEN.size:
        at = text.rfind(pattern, 0, at + len(pattern) - 1)
    return at // _TOKEN.size if at >= 0 else None

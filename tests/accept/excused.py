"""Exchanges that this build cannot answer as recorded: by group and exchange, each with a reason.

They need what a later build brings, or differ on purpose (docs/differences.md). Where only some
counts differ those are named, and everything else must still be equal. An entry whose exchange
passes is reported, so that this table only ever shrinks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NAMES = re.compile(r"[.\[\]/]+")


@dataclass(frozen=True)
class Excuse:
    """Why an exchange differs; `fields` are those that may, empty if the whole answer may."""

    reason: str
    fields: frozenset[str] = frozenset()

    def covers(self, differences: Sequence[str]) -> bool:
        """Whether nothing else differs; a difference starts with a path and a colon."""
        if not self.fields:
            return True
        paths = [difference.partition(":")[0] for difference in differences]
        return all(_NAMES.split(path)[-1] in self.fields for path in paths)


# How much of the prompt was cached, and in which slot the peer kept it.
_REUSE = frozenset({"cache_n", "prompt_n", "cached_tokens", "id_slot"})

# The peer moves prompts between slots and its host cache, which changes the order of their use.
_OTHER_SLOT = Excuse("differs on purpose: slots keep what they hold", frozenset({"id_slot"}))
_SHARED_SHIFT = Excuse("differs on purpose: samples that share a prompt are shifted too")
_KEPT_SLOT = Excuse("differs on purpose: a refused restore leaves the slot as it was")
_SAID_WHY = Excuse(
    "differs on purpose: a refused restore says what is wrong", frozenset({"message"})
)
_NAMES_OF_FILES = Excuse("differs on purpose: names of slot files are of plain characters")
_TENANTS = Excuse("differs on purpose: keys do not share cached prompts", _REUSE)
_ADAPTER_CACHE = Excuse("differs on purpose: no cached token is of another adapter set")
_ADAPTER_SLOT = Excuse(
    "differs on purpose: a slot of another adapter set is left to that set", frozenset({"id_slot"})
)
_NOTHING_KEPT = Excuse("differs on purpose: an embedding keeps nothing in a slot", _REUSE)
_NONE_BEGINS = Excuse(
    "differs on purpose: of a body with a prompt that is too long none begins", _REUSE
)
_WITHHELD = Excuse("differs on purpose: what was withheld comes before the end of a stream")
_PREEMPTION = Excuse("differs on purpose: requests wait for a full pool, none fails")


def _each(excuse: Excuse, *names: str) -> dict[str, Excuse]:
    return dict.fromkeys(names, excuse)


EXCUSED: Mapping[str, Mapping[str, Excuse]] = {
    "auth": _each(_TENANTS, "bare key", "x-api-key"),
    "chat_forms": {"parts": _OTHER_SLOT},
    "completion": {
        **_each(
            _OTHER_SLOT,
            "ends by itself",
            "stop",
            "stop across tokens",
            "stop is one string",
            "stop never complete",
            "empty stop string",
            "ignore_eos",
        ),
    },
    "context_shift": {"two samples, past the end": _SHARED_SHIFT},
    "lora": {
        "empty set is the server's": _ADAPTER_CACHE,
        **_each(_ADAPTER_SLOT, "one of them", "server set, changed"),
    },
    "errors": {"stop: 5": _NONE_BEGINS},
    "embeddings_mean": {"completion on the same server": _NOTHING_KEPT},
    "pool_full": _each(_PREEMPTION, "two do not fit", "two do not fit, stream", "slots"),
    "stream": {"held back at the limit": _WITHHELD},
    "slots": {
        "slots, after refusals": _KEPT_SLOT,
        **_each(
            _SAID_WHY,
            "restore a missing file",
            "restore garbage.bin",
            "restore version.bin",
            "restore cut.bin",
        ),
        "filename 7": _NAMES_OF_FILES,
    },
}

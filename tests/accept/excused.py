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

_CHAT_SCHEMA = Excuse("needs the grammar of a chat's format")
_TOOLS = Excuse("needs tools")
_SAMPLES = Excuse("needs samples that share their prompt", _REUSE)
_HOST_CACHE = Excuse("needs the host cache, which keeps a prompt when its slot is taken", _REUSE)
_CACHE_REUSE = Excuse("needs n_cache_reuse", _REUSE)
_AFTER_TOOLS = Excuse("follows an answer that needs tools", _REUSE)
_KEPT_SLOT = Excuse("differs on purpose: a refused restore leaves the slot as it was")
_NAMES_OF_FILES = Excuse("differs on purpose: names of slot files are of plain characters")
_TENANTS = Excuse("differs on purpose: keys do not share cached prompts", _REUSE)
_ADAPTER_CACHE = Excuse("differs on purpose: no cached token is of another adapter set")
_ADAPTER_SLOT = Excuse(
    "differs on purpose: a slot of another adapter set is left to that set", frozenset({"id_slot"})
)
_PREEMPTION = Excuse("differs on purpose: requests wait for a full pool, none fails")


def _each(excuse: Excuse, *names: str) -> dict[str, Excuse]:
    return dict.fromkeys(names, excuse)


EXCUSED: Mapping[str, Mapping[str, Excuse]] = {
    "auth": _each(_TENANTS, "bare key", "x-api-key"),
    "cache": {
        "pinned to the other's slot": _HOST_CACHE,
        "chunk is moved": _CACHE_REUSE,
        "grown by its own output": _HOST_CACHE,
    },
    "chat_forms": {
        "parts": _HOST_CACHE,
        "stream, two samples": _SAMPLES,
    },
    "completion": {
        "prompt object": _HOST_CACHE,
        "two samples": _SAMPLES,
        **_each(
            _HOST_CACHE,
            "ends by itself",
            "fields",
            "stop",
            "stop across tokens",
            "stop is one string",
            "stop never complete",
            "empty stop string",
            "ignore_eos",
            "slot id out of range",
        ),
    },
    "messages": {"again": _HOST_CACHE},
    "lora": {
        "empty set is the server's": _ADAPTER_CACHE,
        **_each(_ADAPTER_SLOT, "one of them", "server set, changed"),
    },
    "openai_chat": {
        "logprobs": _HOST_CACHE,
        "json object": _CHAT_SCHEMA,
        "json schema": _CHAT_SCHEMA,
    },
    "openai_completions": {
        "two samples": _SAMPLES,
        "stream, batch": _HOST_CACHE,
        "verbose": _HOST_CACHE,
    },
    "pool_full": _each(_PREEMPTION, "two do not fit", "two do not fit, stream", "slots"),
    "responses": {"stream": _HOST_CACHE},
    "slots": {
        "slots, after refusals": _KEPT_SLOT,
        "filename 7": _NAMES_OF_FILES,
    },
    "stream": {
        "two samples": _SAMPLES,
    },
}

"""The loaded adapters: their ids, places and server-wide scales. Owned by the engine thread.

An id counts up and is never used again; a place in the banks is. Who uses an adapter is asked, not
counted, so that no count can go wrong.

Example:
    loaded = LoadedAdapters(store, AdapterCapacity(count=2, rank=16))
    adapter = loaded.attach(NewAdapter("poem", "poem.gguf", 1.0, content))
    loaded.freeze(None, prompt=(1, 2, 3)).scales
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.content import AdapterContent, AdapterFacts
from engine.adapters.effective import (
    BASE,
    EffectiveSet,
    SetMember,
    last_occurrence,
    make_set,
    to_float32,
)
from engine.adapters.errors import AdapterExists, AdapterRoom
from engine.adapters.store import AdapterStore
from engine.errors import InvalidField, NoSuchAdapter
from engine.types import AdapterInfo, AdapterScale


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that was read and checked, and the scale that it gets in the server's set."""

    name: str
    path: str
    scale: float
    content: AdapterContent


@dataclass(frozen=True)
class LoadedAdapter:
    """One adapter in its place. `scale` is its float32 in the server's set."""

    adapter_id: int
    place: int
    name: str
    path: str
    scale: float
    facts: AdapterFacts


def describe_adapter(adapter: LoadedAdapter, active_requests: int) -> AdapterInfo:
    """Returns an adapter as lists show it."""
    facts = adapter.facts
    return AdapterInfo(
        adapter_id=adapter.adapter_id,
        name=adapter.name,
        path=adapter.path,
        rank=facts.rank,
        alpha=facts.alpha,
        scale=adapter.scale,
        size_bytes=facts.nbytes,
        active_requests=active_requests,
        task_name=facts.task_name,
        prompt_prefix=facts.prompt_prefix,
        invocation_tokens=facts.invocation_tokens,
        targets=facts.targets,
        digest=facts.digest,
    )


class LoadedAdapters:
    """The set of loaded adapters."""

    def __init__(self, store: AdapterStore, capacity: AdapterCapacity) -> None:
        """Starts with all places free."""
        self._store = store
        self._capacity = capacity
        # Replaced, never changed: other threads read it.
        self._adapters: dict[int, LoadedAdapter] = {}
        self._next_id = 0

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """By rising id; any thread may ask."""
        return tuple(self._adapters.values())

    @property
    def capacity(self) -> AdapterCapacity:
        """How many fit, and of which rank."""
        return self._capacity

    @property
    def ids(self) -> frozenset[int]:
        """Their ids; any thread may ask."""
        return frozenset(self._adapters)

    def attach(self, new: NewAdapter) -> LoadedAdapter:
        """Puts an adapter into a free place; the same name with the same content is that one.

        Raises:
            AdapterExists: The name is taken by other content.
            AdapterRoom: Every place is taken.
        """
        for adapter in self._adapters.values():
            if adapter.name != new.name:
                continue
            if adapter.facts.digest != new.content.facts.digest:
                raise AdapterExists(new.name, adapter.adapter_id)
            return adapter
        taken = {adapter.place for adapter in self._adapters.values()}
        free = [place for place in range(self._capacity.count) if place not in taken]
        if not free:
            raise AdapterRoom(new.content.facts.nbytes, 0, self._capacity.count)
        self._store.write_adapter(free[0], new.content)
        scale = to_float32(new.scale)
        adapter = LoadedAdapter(
            self._next_id, free[0], new.name, new.path, scale, new.content.facts
        )
        self._next_id += 1
        self._adapters = self._adapters | {adapter.adapter_id: adapter}
        return adapter

    def detach(self, adapter_id: int) -> int:
        """Frees an adapter's place, which nobody may be using; returns the bytes.

        Raises:
            NoSuchAdapter: It is not loaded.
        """
        adapter = self.get(adapter_id)
        self._store.clear_adapter(adapter.place)
        self._adapters = {i: one for i, one in self._adapters.items() if i != adapter_id}
        return adapter.facts.nbytes

    def get(self, adapter_id: int) -> LoadedAdapter:
        """Returns an adapter.

        Raises:
            NoSuchAdapter: It is not loaded.
        """
        adapter = self._adapters.get(adapter_id)
        if adapter is None:
            raise NoSuchAdapter(adapter_id)
        return adapter

    def set_scales(self, scales: Iterable[AdapterScale]) -> None:
        """Replaces the server's set: what is not named is 0.

        Raises:
            NoSuchAdapter: One is not loaded; nothing is changed.
        """
        named = {self.get(entry.adapter_id).adapter_id: entry.scale for entry in scales}
        self._adapters = {
            adapter_id: replace(adapter, scale=to_float32(named.get(adapter_id, 0.0)))
            for adapter_id, adapter in self._adapters.items()
        }

    def freeze(self, scales: Sequence[AdapterScale] | None, prompt: Sequence[int]) -> EffectiveSet:
        """Returns the set of a request that is admitted now; None is the server's.

        Where only activated adapters are on there must be one, and it works from one token before
        its last invocation in the prompt on: the peer's position. Without an invocation it is off.

        Raises:
            NoSuchAdapter: One is not loaded any more.
            InvalidField: Two activated adapters are on.

        Source: llama.cpp's server_context::launch_slot_with_task, lora_all_alora.
        """
        if scales is None:
            chosen = [(adapter, adapter.scale) for adapter in self._adapters.values()]
        else:
            chosen = [(self.get(e.adapter_id), to_float32(e.scale)) for e in scales]
        active = [(adapter, scale) for adapter, scale in chosen if scale != 0]
        whole = make_set(
            SetMember(adapter.adapter_id, adapter.place, adapter.facts.digest, scale)
            for adapter, scale in active
        )
        if not active or not all(a.facts.invocation_tokens for a, _ in active):
            return whole
        if len(active) > 1:
            names = ", ".join(str(adapter.adapter_id) for adapter, _ in active)
            raise InvalidField(
                "adapters", f"activated adapters {names} are on, a request runs with one at most"
            )
        start = last_occurrence(prompt, active[0][0].facts.invocation_tokens)
        if start is None:
            return BASE
        return replace(whole, active_from=max(0, start - 1))

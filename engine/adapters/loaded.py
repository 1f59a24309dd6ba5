"""The loaded adapters: their ids, places and server-wide scales. Owned by the engine thread.

An id counts up and is never used again; a place in the banks is. Who uses an adapter is asked, not
counted, so that no count can go wrong.

Example:
    loaded = LoadedAdapters(store, AdapterCapacity(count=2, rank=16), place_bytes=12304)
    adapter = loaded.attach(NewAdapter("poem", "poem.gguf", 1.0, content))
    loaded.freeze(None, prompt=(1, 2, 3)).scales
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from engine.requests import AdapterScale
from engine.types import AdapterInfo


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that was read and checked, and the scale that it gets in the server's set.

    `path` is as somebody named it, `source` where it was read. `adapter_id` None is the next one.
    """

    name: str
    path: str
    scale: float
    content: AdapterContent
    source: Path = Path()
    adapter_id: int | None = None


@dataclass(frozen=True)
class LoadedAdapter:
    """One adapter in its place. `scale` is its float32 in the server's set."""

    adapter_id: int
    place: int
    name: str
    path: str
    scale: float
    facts: AdapterFacts
    source: Path = Path()


def describe_adapter(
    adapter: LoadedAdapter, active_requests: int, *, is_leaving: bool = False
) -> AdapterInfo:
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
        is_leaving=is_leaving,
    )


class LoadedAdapters:
    """The set of loaded adapters."""

    def __init__(self, store: AdapterStore, capacity: AdapterCapacity, *, place_bytes: int) -> None:
        """Starts with all places free; `place_bytes` is what one takes in the banks."""
        self._store = store
        self._capacity = capacity
        self._place_bytes = place_bytes
        # Replaced, never changed: other threads read them.
        self._adapters: dict[int, LoadedAdapter] = {}
        self._leaving: frozenset[int] = frozenset()
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
    def next_id(self) -> int:
        """The id that the next adapter gets; any thread may ask."""
        return self._next_id

    def skip_to(self, next_id: int) -> None:
        """Never gives an id below `next_id`: another engine has given those."""
        self._next_id = max(self._next_id, next_id)

    @property
    def ids(self) -> frozenset[int]:
        """The ids that a request may name; any thread may ask."""
        return frozenset(self._adapters) - self._leaving

    @property
    def free_bytes(self) -> int:
        """What the free places hold; any thread may ask."""
        return (self._capacity.count - len(self._adapters)) * self._place_bytes

    def check_room(self, name: str) -> None:
        """Checks, before anything of an adapter is read, that there will be a place for it.

        Any thread may ask; the answer may be another by the time that it is attached.

        Raises:
            AdapterRoom: Every place is taken, and by no adapter of this name.
        """
        is_known = any(adapter.name == name for adapter in self._adapters.values())
        if not is_known and len(self._adapters) >= self._capacity.count:
            raise AdapterRoom(self._place_bytes, self.free_bytes, self._capacity.count)

    def attach(self, new: NewAdapter) -> LoadedAdapter:
        """Attaches an adapter without a step in between; see `attaching`."""
        writing = self.attaching(new)
        while True:
            try:
                next(writing)
            except StopIteration as end:
                return end.value

    def attaching(self, new: NewAdapter) -> Generator[int, None, LoadedAdapter]:
        """Puts an adapter into a free place; the same name with the same content is that one.

        Piece by piece: yields the bytes of each. Nothing is attached before the end, and only one
        adapter may be on its way.

        Raises:
            AdapterExists: The name is taken.
            AdapterRoom: Every place is taken.
        """
        for adapter in self._adapters.values():
            if adapter.name != new.name:
                continue
            is_same = adapter.facts.digest == new.content.facts.digest
            if not is_same or adapter.adapter_id in self._leaving:
                raise AdapterExists(new.name, adapter.adapter_id)
            return adapter
        self.check_room(new.name)
        taken = {adapter.place for adapter in self._adapters.values()}
        place = next(place for place in range(self._capacity.count) if place not in taken)
        yield from self._store.write_adapter(place, new.content)
        scale = to_float32(new.scale)
        adapter_id = self._next_id if new.adapter_id is None else new.adapter_id
        adapter = LoadedAdapter(
            adapter_id, place, new.name, new.path, scale, new.content.facts, new.source
        )
        self._next_id = max(self._next_id, adapter_id + 1)
        self._adapters = self._adapters | {adapter.adapter_id: adapter}
        return adapter

    def leave(self, adapter_ids: Iterable[int]) -> None:
        """Says which adapters are to be unloaded: for who comes now they are gone already."""
        self._leaving = frozenset(adapter_ids)

    def described(self, count_users: Callable[[int], int]) -> tuple[AdapterInfo, ...]:
        """Returns the adapters as lists show them; `count_users` of an id's running requests."""
        infos: list[AdapterInfo] = []
        for each in self.adapters:
            adapter_id = each.adapter_id
            users, is_leaving = count_users(adapter_id), self.is_leaving(adapter_id)
            infos.append(describe_adapter(each, users, is_leaving=is_leaving))
        return tuple(infos)

    def is_leaving(self, adapter_id: int) -> bool:
        """Whether an adapter is to be unloaded once its last user has ended; any thread may ask."""
        return adapter_id in self._leaving

    def detach(self, adapter_id: int) -> int:
        """Frees an adapter's place, which nobody may be using; returns the bytes.

        Raises:
            NoSuchAdapter: It is not loaded.
        """
        adapter = self.get(adapter_id)
        self._store.clear_adapter(adapter.place)
        self._adapters = {i: one for i, one in self._adapters.items() if i != adapter_id}
        return self._place_bytes

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
            NoSuchAdapter: One is not loaded, or about to go; nothing is changed.
        """
        named = {self._usable(entry.adapter_id).adapter_id: entry.scale for entry in scales}
        self._adapters = {
            adapter_id: replace(adapter, scale=to_float32(named.get(adapter_id, 0.0)))
            for adapter_id, adapter in self._adapters.items()
        }

    def freeze(self, scales: Sequence[AdapterScale] | None, prompt: Sequence[int]) -> EffectiveSet:
        """Returns the set of a request that is admitted now; None is the server's.

        What is about to be unloaded is in no new set.

        Where only activated adapters are on there must be one, and it works from one token before
        its last invocation in the prompt on: the peer's position. Without an invocation it is off.

        Raises:
            NoSuchAdapter: One is not loaded any more, or about to go.
            InvalidField: Two activated adapters are on.

        Source: llama.cpp's server_context::launch_slot_with_task, lora_all_alora.
        """
        if scales is None:
            staying = (a for i, a in self._adapters.items() if i not in self._leaving)
            chosen = [(adapter, adapter.scale) for adapter in staying]
        else:
            chosen = [(self._usable(e.adapter_id), to_float32(e.scale)) for e in scales]
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

    def _usable(self, adapter_id: int) -> LoadedAdapter:
        adapter = self.get(adapter_id)
        if adapter_id in self._leaving:
            raise NoSuchAdapter(adapter_id)
        return adapter

"""The loaded set: ids, places, scales, and the set that a request gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.changes import STEP_BYTES, AdapterChanges, Load, Unload
from engine.adapters.content import AdapterContent, Pair, make_content
from engine.adapters.errors import AdapterExists, AdapterInUse, AdapterRoom
from engine.adapters.loaded import LoadedAdapter, LoadedAdapters, NewAdapter
from engine.errors import InvalidField, NoSuchAdapter, ShuttingDown
from engine.requests import AdapterScale

WEIGHT = "blk.0.attn_q.weight"
PLACE_BYTES = 200
PIECE_BYTES = STEP_BYTES // 2


@dataclass
class Places:
    """A store that remembers what it was told."""

    held: dict[int, bytes] = field(default_factory=dict[int, bytes])
    fails: bool = False

    def write_adapter(self, place: int, content: AdapterContent) -> Iterator[int]:
        for _ in range(3):
            assert place not in self.held
            yield PIECE_BYTES
            if self.fails:
                raise RuntimeError("the device is gone")
        self.held[place] = content.facts.digest

    def clear_adapter(self, place: int) -> None:
        del self.held[place]


def content(seed: int, *tokens: int) -> AdapterContent:
    values = np.full((2, 4), seed, np.float32)
    return make_content({WEIGHT: Pair(values, values, "f32", 1.0)}, invocation_tokens=tokens)


def new(name: str, seed: int, *tokens: int, scale: float = 1.0) -> NewAdapter:
    return NewAdapter(name, f"{name}.gguf", scale, content(seed, *tokens))


@pytest.fixture(name="store")
def make_store() -> Places:
    return Places()


@pytest.fixture(name="loaded")
def make_loaded(store: Places) -> LoadedAdapters:
    return LoadedAdapters(store, AdapterCapacity(count=2, rank=8), place_bytes=PLACE_BYTES)


def test_ids_are_never_used_again_and_places_are(store: Places, loaded: LoadedAdapters) -> None:
    first, second = loaded.attach(new("a", 1)), loaded.attach(new("b", 2))
    assert [first.adapter_id, second.adapter_id] == [0, 1]
    assert loaded.free_bytes == 0
    assert loaded.detach(0) == PLACE_BYTES == loaded.free_bytes
    third = loaded.attach(new("a", 3))
    assert (third.adapter_id, third.place) == (2, first.place)
    assert len(store.held) == 2
    with pytest.raises(NoSuchAdapter):
        loaded.get(0)


def test_a_name_is_one_content(store: Places, loaded: LoadedAdapters) -> None:
    first = loaded.attach(new("a", 1))
    assert loaded.attach(new("a", 1, scale=0.5)) == first
    with pytest.raises(AdapterExists, match="'a' is taken by adapter 0"):
        loaded.attach(new("a", 2))
    assert len(store.held) == 1


def test_no_room_names_the_numbers(store: Places, loaded: LoadedAdapters) -> None:
    loaded.attach(new("a", 1))
    loaded.attach(new("b", 2))
    with pytest.raises(AdapterRoom, match="needs 200 bytes, 0 are free: all 2 places"):
        loaded.attach(new("c", 3))
    with pytest.raises(AdapterRoom):
        loaded.check_room("c")
    loaded.check_room("b")
    assert len(store.held) == len(loaded.adapters) == 2


def test_a_write_that_fails_attaches_nothing(store: Places, loaded: LoadedAdapters) -> None:
    store.fails = True
    with pytest.raises(RuntimeError, match="gone"):
        loaded.attach(new("a", 1))
    assert loaded.adapters == ()
    store.fails = False
    assert loaded.attach(new("a", 1)).place == 0


def test_an_explicit_set_turns_the_others_off(loaded: LoadedAdapters) -> None:
    loaded.attach(new("a", 1))
    loaded.attach(new("b", 2, scale=0.5))
    assert loaded.freeze(None, ()).scales == (AdapterScale(0, 1.0), AdapterScale(1, 0.5))
    assert loaded.freeze((AdapterScale(1, -2.0),), ()).scales == (AdapterScale(1, -2.0),)
    assert loaded.freeze((), ()).scales == ()
    with pytest.raises(NoSuchAdapter, match="adapter id 9"):
        loaded.freeze((AdapterScale(9, 1.0),), ())


def test_scales_are_replaced_whole_or_not_at_all(loaded: LoadedAdapters) -> None:
    loaded.attach(new("a", 1))
    loaded.attach(new("b", 2))
    before = loaded.freeze(None, ())
    loaded.set_scales([AdapterScale(1, 0.25)])
    assert loaded.freeze(None, ()).scales == (AdapterScale(1, 0.25),)
    assert before.scales == (AdapterScale(0, 1.0), AdapterScale(1, 1.0)), "frozen"
    with pytest.raises(NoSuchAdapter):
        loaded.set_scales([AdapterScale(0, 1.0), AdapterScale(5, 1.0)])
    assert loaded.freeze(None, ()).scales == (AdapterScale(1, 0.25),)


class TestActivated:
    def test_from_one_before_its_last_invocation(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1, 5, 6))
        assert loaded.freeze(None, (1, 5, 6, 2, 5, 6, 3)).active_from == 3
        assert loaded.freeze(None, (5, 6, 3)).active_from == 0

    def test_off_without_an_invocation(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1, 5, 6))
        assert loaded.freeze(None, (1, 5, 2, 6)).members == ()

    def test_two_are_refused(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1, 5))
        loaded.attach(new("b", 2, 6))
        with pytest.raises(InvalidField, match="activated adapters 0, 1 are on"):
            loaded.freeze(None, (5, 6))
        assert loaded.freeze((AdapterScale(1, 1.0),), (4, 5, 6)).active_from == 1

    def test_beside_an_ordinary_one_it_is_ordinary(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1, 5))
        loaded.attach(new("b", 2))
        frozen = loaded.freeze(None, (1, 2, 3))
        assert (len(frozen.members), frozen.active_from) == (2, 0)


def test_what_is_about_to_go_is_in_no_new_set(loaded: LoadedAdapters) -> None:
    for name in "ab":
        loaded.attach(new(name, ord(name)))
    before = loaded.freeze(None, ())
    loaded.leave([0])
    assert before.uses(0)
    assert (loaded.ids, loaded.is_leaving(0)) == ({1}, True)
    assert loaded.freeze(None, ()).scales == (AdapterScale(1, 1.0),)
    with pytest.raises(NoSuchAdapter, match="adapter id 0"):
        loaded.freeze((AdapterScale(0, 1.0),), ())
    with pytest.raises(NoSuchAdapter, match="adapter id 0"):
        loaded.set_scales([AdapterScale(0, 1.0)])
    with pytest.raises(AdapterExists, match="about to be unloaded"):
        loaded.attach(new("a", ord("a")))
    loaded.leave([])
    assert loaded.freeze(None, ()) == before


class TestUnloads:
    def changes(self, loaded: LoadedAdapters, users: dict[int, int]) -> AdapterChanges:
        return AdapterChanges(loaded, lambda adapter_id: users.get(adapter_id, 0))

    def test_waits_for_users_and_lets_no_new_ones_in(
        self, store: Places, loaded: LoadedAdapters
    ) -> None:
        loaded.attach(new("a", 1))
        users = {0: 2}
        changes, done = self.changes(loaded, users), Future[int]()
        changes.add_unload(Unload(0, False, done))
        assert loaded.is_leaving(0)
        changes.run()
        assert not done.done()
        assert (len(changes), loaded.is_leaving(0)) == (1, True)
        users.clear()
        changes.run()
        assert done.result(0) == PLACE_BYTES
        assert (store.held, len(changes), loaded.is_leaving(0)) == ({}, 0, False)

    def test_fails_at_once_if_asked(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1))
        changes, done = self.changes(loaded, {0: 2}), Future[int]()
        changes.add_unload(Unload(0, True, done))
        with pytest.raises(AdapterInUse, match="adapter 0 is in use by 2 requests"):
            done.result(0)
        assert (len(changes), loaded.is_leaving(0)) == (0, False)

    def test_who_gave_up_leaves_it_loaded(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1))
        users: dict[int, int] = {0: 1}
        changes, done, other = self.changes(loaded, users), Future[int](), Future[int]()
        changes.add_unload(Unload(0, False, done))
        changes.add_unload(Unload(0, False, other))
        done.cancel()
        changes.run()
        assert loaded.is_leaving(0), "another still waits"
        other.cancel()
        users.clear()
        changes.run()
        assert (len(loaded.adapters), loaded.is_leaving(0)) == (1, False)

    def test_an_unknown_id_and_the_end(self, loaded: LoadedAdapters) -> None:
        loaded.attach(new("a", 1))
        users: dict[int, int] = {0: 1}
        changes = self.changes(loaded, users)
        unknown, waiting = Future[int](), Future[int]()
        changes.add_unload(Unload(4, False, unknown))
        changes.run()
        with pytest.raises(NoSuchAdapter):
            unknown.result(0)
        changes.add_unload(Unload(0, False, waiting))
        changes.fail(ShuttingDown)
        with pytest.raises(ShuttingDown):
            waiting.result(0)
        assert not loaded.is_leaving(0)


class TestLoads:
    """Each piece of the store is half of what is written between two steps."""

    @pytest.fixture(name="changes")
    def make_changes(self, loaded: LoadedAdapters) -> AdapterChanges:
        return AdapterChanges(loaded, lambda _: 0)

    def load(self, changes: AdapterChanges, one: NewAdapter) -> Future[LoadedAdapter]:
        done: Future[LoadedAdapter] = Future()
        changes.add_load(Load(one, done))
        return done

    def test_a_step_writes_no_more_than_its_share(
        self, changes: AdapterChanges, loaded: LoadedAdapters
    ) -> None:
        first, second = self.load(changes, new("a", 1)), self.load(changes, new("b", 2))
        changes.run()  # two of three pieces
        assert (loaded.adapters, first.done()) == ((), False)
        changes.run()  # the third, and the first of the other
        assert [one.name for one in loaded.adapters] == ["a"]
        assert (first.result(0).adapter_id, second.done()) == (0, False)
        changes.run()
        changes.run()
        assert second.result(0).place == 1
        assert len(changes) == 0

    def test_who_gives_up_half_way_leaves_its_place_free(
        self, store: Places, changes: AdapterChanges, loaded: LoadedAdapters
    ) -> None:
        first = self.load(changes, new("a", 1))
        changes.run()
        first.cancel()
        second = self.load(changes, new("b", 2))
        for _ in range(3):
            changes.run()
        assert (second.result(0).adapter_id, second.result(0).place) == (0, 0)
        assert store.held == {0: second.result(0).facts.digest}

    def test_a_refusal_is_one_loads_own(self, changes: AdapterChanges) -> None:
        loads = [self.load(changes, new("a", seed)) for seed in (1, 2, 1)]
        for _ in range(4):
            changes.run()
        assert loads[2].result(0) == loads[0].result(0)
        with pytest.raises(AdapterExists):
            loads[1].result(0)

    def test_the_end_fails_what_is_half_written(
        self, changes: AdapterChanges, loaded: LoadedAdapters
    ) -> None:
        loads = [self.load(changes, new(name, 1)) for name in "ab"]
        changes.run()
        changes.fail(ShuttingDown)
        changes.run()
        for load in loads:
            with pytest.raises(ShuttingDown):
                load.result(0)
        assert loaded.adapters == ()


def test_capacity_is_arithmetic() -> None:
    shapes: list[Any] = [(64, 32), (10, 10)]
    assert AdapterCapacity(count=3, rank=9).bank_rank == 16
    assert AdapterCapacity(count=3, rank=9).nbytes(shapes) == 3 * (16 * 4 * (96 + 20) + 16)
    assert AdapterCapacity().nbytes(shapes) == 0
    shapes.append((5, 64, 32))
    assert AdapterCapacity(count=3, rank=9).nbytes(shapes) == 3 * (16 * 4 * (96 + 20) + 16)
    experts = AdapterCapacity(count=3, rank=9, has_experts=True)
    assert experts.nbytes(shapes) == 3 * (16 * 4 * (96 + 20 + 5 * 96) + 8 * (2 + 5))

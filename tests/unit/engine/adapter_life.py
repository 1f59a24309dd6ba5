"""The adapters of a simulated engine: random commands, and what every request must get of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine.adapters.content import AdapterContent, Pair, make_content
from engine.adapters.loaded import LoadedAdapter, NewAdapter
from engine.engine import Engine
from engine.errors import EngineError, NoSuchAdapter
from engine.requests import AdapterScale, Request
from engine.types import Snapshot, Started
from tests.fake_logits import set_number
from tests.fake_runner import FakeRunner

_SCALES = (0.0, -0.0, 1.0, 0.5, -2.0, 1e-60)
# Of the fake's only weight, 4x4, at 8 ranks: float32, an entry and a factor.
PLACE_BYTES = 8 * 8 * 4 + 8


def content(seed: int, *invocation: int) -> AdapterContent:
    """An adapter that the fake model tells from others by its digest."""
    values = np.full((2, 4), seed, np.float32)
    pair = Pair(values, values, "f32", 1.0)
    return make_content({"blk.0.attn_q.weight": pair}, invocation_tokens=invocation)


class AdapterLife:
    """Loads, scales and unloads; keeps its own books of what the server's set must be."""

    def __init__(self, seed: int, letters: Sequence[int]) -> None:
        self.rng = random.Random(seed)
        self.num_places = self.rng.choice([0, 1, 3])
        a, b = letters
        self._contents = [content(1), content(2), content(3), content(4, a, b), content(5, b)]
        self.digests: dict[int, bytes] = {}
        self._invocations: dict[int, tuple[int, ...]] = {}
        self.server: dict[int, float] = {}
        self.seen: Counter[str] = Counter()
        self._waiting: list[Future[Any]] = []
        self._unloads: list[tuple[int, Future[int]]] = []

    # Commands.

    def command(self, engine: Engine) -> None:
        """Does one thing to the loaded adapters; what comes of it is known in the next step."""
        draw = self.rng.random()
        if draw < 0.45:
            self._load(engine)
        elif draw < 0.75:
            self._set_scales(engine)
        else:
            self._unload(engine)

    def _load(self, engine: Engine) -> None:
        rng = self.rng
        wanted = rng.choice(self._contents)
        scale = rng.choice(_SCALES)
        new = NewAdapter(rng.choice("abcd"), "x.gguf", scale, wanted)
        done = engine.adapters.load(new)
        if rng.random() < 0.05:
            done.cancel()
        done.add_done_callback(lambda one: self._loaded(one, wanted, scale))
        self._waiting.append(done)

    def _loaded(self, done: Future[LoadedAdapter], wanted: AdapterContent, scale: float) -> None:
        if self._has_failed(done, "load"):
            return
        adapter = done.result()
        assert adapter.facts.digest == wanted.facts.digest
        if adapter.adapter_id in self.server:
            self.seen["load:again"] += 1
            return
        assert adapter.adapter_id not in self.digests, "an id was used again"
        self.digests[adapter.adapter_id] = wanted.facts.digest
        self._invocations[adapter.adapter_id] = wanted.facts.invocation_tokens
        self.server[adapter.adapter_id] = float(np.float32(scale))
        self.seen["loaded"] += 1

    def _set_scales(self, engine: Engine) -> None:
        rng = self.rng
        named = rng.sample(sorted(self.server), rng.randint(0, len(self.server)))
        if rng.random() < 0.1:
            named.append(10**6)
        scales = [AdapterScale(one, rng.choice(_SCALES)) for one in named]
        done = engine.adapters.set_scales(scales)
        done.add_done_callback(lambda one: self._scaled(one, scales))
        self._waiting.append(done)

    def _scaled(self, done: Future[None], scales: Sequence[AdapterScale]) -> None:
        if self._has_failed(done, "scales"):
            return
        named = {entry.adapter_id: float(np.float32(entry.scale)) for entry in scales}
        self.server = {one: named.get(one, 0.0) for one in self.server}
        self.seen["scaled"] += 1

    def _unload(self, engine: Engine) -> None:
        rng = self.rng
        adapter_id = rng.choice([*self.server, 10**6])
        try:
            done = engine.adapters.unload(adapter_id, fail_if_busy=rng.random() < 0.3)
        except NoSuchAdapter:
            return
        if rng.random() < 0.1:
            done.cancel()
        done.add_done_callback(lambda one: self._unloaded(one, adapter_id))
        self._waiting.append(done)
        self._unloads.append((adapter_id, done))

    def _unloaded(self, done: Future[int], adapter_id: int) -> None:
        if self._has_failed(done, "unload"):
            return
        assert done.result() == PLACE_BYTES
        del self.server[adapter_id]
        self.seen["unloaded"] += 1

    def _has_failed(self, done: Future[Any], what: str) -> bool:
        if done.cancelled():
            return True
        error = done.exception()
        if error is None:
            return False
        assert isinstance(error, EngineError), error
        self.seen[f"{what}:{error.reason}"] += 1
        return True

    def draw_set(self) -> tuple[AdapterScale, ...] | None:
        """A request's own set, or the server's."""
        rng = self.rng
        if rng.random() < 0.4:
            return None
        named = rng.sample(sorted(self.server), rng.randint(0, len(self.server)))
        return tuple(AdapterScale(one, rng.choice(_SCALES)) for one in named)

    # Judgement.

    def check_started(self, request: Request, started: Started, now: Snapshot) -> None:
        """The echo is the set in force at admission: of the request, else of the server."""
        leaving = {one.adapter_id for one in now.adapters if one.is_leaving}
        assert not leaving.intersection(e.adapter_id for e in request.adapters or ())
        if request.adapters is None:
            chosen = {one: scale for one, scale in self.server.items() if one not in leaving}
            self.seen["fenced"] += len(chosen) < len(self.server)
        else:
            chosen = {e.adapter_id: float(np.float32(e.scale)) for e in request.adapters}
        expected = {one: scale for one, scale in chosen.items() if scale}
        if self._are_activated(expected) and self._invoked_at(expected, request) is None:
            expected = {}
        if request.prompt:
            assert {e.adapter_id: e.scale for e in started.adapters} == expected
        if expected:
            self.seen["adapted"] += 1

    def history(self, request: Request, started: Started | None) -> tuple[int, int]:
        """The number of the request's set in the fake model, and from where it works."""
        chosen = {e.adapter_id: e.scale for e in started.adapters} if started else {}
        number = set_number((self.digests[one], scale) for one, scale in chosen.items())
        if not self._are_activated(chosen):
            return number, 0
        at = self._invoked_at(chosen, request)
        assert at is not None
        self.seen["activated"] += 1
        return number, max(0, at - 1)

    def check(self, now: Snapshot, running: Sequence[Started], runner: FakeRunner) -> None:
        """Lists, places and counts of users agree with the books."""
        assert {one.adapter_id: one.scale for one in now.adapters} == self.server
        held = sorted(self.digests[one] for one in self.server)
        assert sorted(runner.places.values()) == held, "a place leaked"
        self._unloads = [(one, done) for one, done in self._unloads if not done.done()]
        waiting = {adapter_id for adapter_id, _ in self._unloads}
        assert {one.adapter_id for one in now.adapters if one.is_leaving} == waiting
        for one in now.adapters:
            users = (e for s in running for e in s.adapters if e.adapter_id == one.adapter_id)
            assert one.active_requests == len(list(users))

    def come_to_rest(self) -> None:
        """Nothing may wait any more."""
        assert all(done.done() for done in self._waiting)

    def _are_activated(self, chosen: dict[int, float]) -> bool:
        return bool(chosen) and all(self._invocations[one] for one in chosen)

    def _invoked_at(self, chosen: dict[int, float], request: Request) -> int | None:
        (one,) = chosen
        wanted, prompt = self._invocations[one], request.prompt
        starts = range(len(prompt) - len(wanted) + 1)
        return max((i for i in starts if prompt[i : i + len(wanted)] == wanted), default=None)

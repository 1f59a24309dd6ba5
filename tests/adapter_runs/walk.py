"""Random commands in turn, each followed by a few steps of an engine that was not started."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from engine.adapters.content import AdapterContent
from engine.adapters.loaded import LoadedAdapter, NewAdapter
from engine.engine import Engine
from engine.errors import EngineError
from engine.requests import AdapterScale
from engine.types import CancelCause
from tests.adapter_runs.replies import Replies, Reply, SoloRuns, judge

SCALES = (1.0, 0.5, -0.75, 0.0)
MAX_TOKENS = (1, 3, 8)


class Walk:
    """Loads, unloads, scales, generates and cancels; then every reply is compared."""

    def __init__(
        self,
        engine: Engine,
        replies: Replies,
        contents: Sequence[AdapterContent],
        prompts: Sequence[tuple[int, ...]],
        seed: int,
    ) -> None:
        self._engine = engine
        self._replies = replies
        self._contents = contents
        self._prompts = prompts
        self._rng = random.Random(seed)
        self._asked: list[Reply] = []
        self._waiting: list[Future[Any]] = []
        self._digests: dict[int, bytes] = {}
        self.seen: Counter[str] = Counter()

    def run(self, num_commands: int) -> None:
        """Lives through the commands and comes to rest, with nothing loaded."""
        for _ in range(num_commands):
            self._command()
            for _ in range(self._rng.choice([0, 1, 1, 2, 5])):
                self._step()
        # Who waits for users of its own must get its turn.
        while any(not wish.done() for wish in [*self._waiting, *(r.done for r in self._asked)]):
            self._step()
        for adapter in self._engine.snapshot().adapters:
            self.wait(self._engine.adapters.unload(adapter.adapter_id))

    def judge(self) -> None:
        """Every reply is its solo run; pools and banks are as at the beginning."""
        solo = SoloRuns(self._engine, self._replies, self._contents, self.wait)
        self.seen["adapted"] = judge(self._asked, self._digests, solo)
        self.seen["solo"] = len(solo)
        now = self._engine.snapshot()
        assert (now.adapters, now.running, now.queued) == ((), 0, 0)
        assert all(pool.used == 0 for pool in now.pools)
        desk = self._engine.adapters
        assert desk.free_bytes == desk.setup.bank_bytes
        self._engine.check_integrity()

    def wait(self, done: Future[Any]) -> Any:
        """Steps until a future has its result."""
        while not done.done():
            self._step()
        return done.result(0)

    def _step(self) -> None:
        assert self._engine.step()

    def _command(self) -> None:
        draw = self._rng.random()
        try:
            if draw < 0.4:
                self._ask()
            elif draw < 0.5:
                self._cancel()
            elif draw < 0.7:
                self._load()
            elif draw < 0.85:
                self._scale()
            else:
                self._unload()
        except EngineError as error:
            self.seen[f"refused:{error.reason}"] += 1

    def _draw_set(self) -> tuple[AdapterScale, ...]:
        ids = sorted(self._engine.adapters.ids)
        named = self._rng.sample(ids, self._rng.randint(0, len(ids)))
        return tuple(AdapterScale(one, self._rng.choice(SCALES)) for one in named)

    def _ask(self) -> None:
        chosen = None if self._rng.random() < 0.5 else self._draw_set()
        prompt, most = self._rng.choice(self._prompts), self._rng.choice(MAX_TOKENS)
        self._asked.append(self._replies.ask(self._engine, prompt, most, chosen))

    def _cancel(self) -> None:
        running = [reply for reply in self._asked if not reply.done.done()]
        if running:
            name = self._rng.choice(running).request.request_id
            self._engine.cancel(name, CancelCause.CLIENT)
            self.seen["cancelled"] += 1

    def _load(self) -> None:
        content = self._rng.choice(self._contents)
        new = NewAdapter(self._rng.choice("abcd"), "x", self._rng.choice(SCALES), content)
        done = self._engine.adapters.load(new)
        done.add_done_callback(self._loaded)
        if self._rng.random() < 0.1:
            done.cancel()
        self._watch(done, "load")

    def _loaded(self, done: Future[LoadedAdapter]) -> None:
        if not done.cancelled() and done.exception() is None:
            adapter = done.result()
            self._digests[adapter.adapter_id] = adapter.facts.digest

    def _scale(self) -> None:
        self._watch(self._engine.adapters.set_scales(self._draw_set()), "scale")

    def _unload(self) -> None:
        ids = sorted(self._engine.adapters.ids)
        if not ids:
            return
        done = self._engine.adapters.unload(
            self._rng.choice(ids), fail_if_busy=self._rng.random() < 0.3
        )
        if self._rng.random() < 0.1:
            done.cancel()
        self._watch(done, "unload")

    def _watch(self, done: Future[Any], what: str) -> None:
        self._waiting.append(done)
        done.add_done_callback(lambda one: self._note(one, what))

    def _note(self, done: Future[Any], what: str) -> None:
        if done.cancelled():
            self.seen[f"{what}:given up"] += 1
            return
        error = done.exception()
        assert error is None or isinstance(error, EngineError), error
        self.seen[f"{what}:{error.reason if error else 'done'}"] += 1

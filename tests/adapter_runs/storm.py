"""Threads that load, unload and rescale the same names with new content, under many streams."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.adapters.content import AdapterContent
from engine.adapters.loaded import NewAdapter
from engine.engine import Engine
from engine.errors import EngineError, NoSuchAdapter
from engine.requests import AdapterScale
from engine.types import Failed
from tests.adapter_runs.replies import Replies, Reply, SoloRuns, judge
from tests.adapter_runs.walk import MAX_TOKENS, SCALES

NUM_CHANGERS, NUM_STREAMS = 4, 16
_LONG_S = 120.0


def wait(done: Future[Any]) -> Any:
    """The result of something that a started engine does."""
    return done.result(_LONG_S)


class Storm:
    """A started engine under changes and streams from many threads, judged afterwards."""

    def __init__(
        self,
        engine: Engine,
        replies: Replies,
        contents: Sequence[AdapterContent],
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        self._engine = engine
        self._replies = replies
        self._contents = contents
        self._prompts = prompts
        self._asked: list[Reply] = []
        self._digests: dict[int, bytes] = {}
        self._is_over = False
        self.seen: Counter[str] = Counter()

    def run(self, goes_on: Callable[[int], bool]) -> None:
        """Streams ask while `goes_on(requests of theirs)`; then every reply is compared."""
        with ThreadPoolExecutor(NUM_CHANGERS + NUM_STREAMS) as threads:
            changers = [threads.submit(self._change, seed) for seed in range(NUM_CHANGERS)]
            streams = [threads.submit(self._stream, 100 + n, goes_on) for n in range(NUM_STREAMS)]
            try:
                for stream in streams:
                    self._asked += stream.result()
            finally:
                self._is_over = True
            for changer in changers:
                changes, digests = changer.result()
                self.seen += changes
                self._digests |= digests
        self._rest()

    def _rest(self) -> None:
        desk = self._engine.adapters
        for adapter in self._engine.snapshot().adapters:
            wait(desk.unload(adapter.adapter_id))
        solo = SoloRuns(self._engine, self._replies, self._contents, wait)
        self.seen["replies"] = len(self._asked)
        self.seen["adapted"] = judge(self._asked, self._digests, solo)
        self.seen["solo"] = len(solo)
        assert desk.free_bytes == desk.setup.bank_bytes

    def _stream(self, seed: int, goes_on: Callable[[int], bool]) -> list[Reply]:
        rng = random.Random(seed)
        asked: list[Reply] = []
        while goes_on(len(asked)):
            chosen = None if rng.random() < 0.5 else self._draw_set(rng)
            prompt, most = rng.choice(self._prompts), rng.choice(MAX_TOKENS)
            try:
                reply = self._replies.ask(self._engine, prompt, most, chosen)
            except NoSuchAdapter:
                continue  # it went between the draw and the call
            end = wait(reply.done)
            if isinstance(end, Failed):
                assert isinstance(end.error, NoSuchAdapter), end
            asked.append(reply)
        return asked

    def _draw_set(self, rng: random.Random) -> tuple[AdapterScale, ...]:
        ids = sorted(self._engine.adapters.ids)
        named = rng.sample(ids, rng.randint(0, len(ids)))
        return tuple(AdapterScale(one, rng.choice(SCALES)) for one in named)

    def _change(self, seed: int) -> tuple[Counter[str], dict[int, bytes]]:
        rng = random.Random(seed)
        seen: Counter[str] = Counter()
        digests: dict[int, bytes] = {}
        while not self._is_over:
            what = rng.choice(["load", "load", "unload", "scale"])
            try:
                self._change_once(rng, what, digests)
            except TimeoutError:
                seen[f"{what}:gave up"] += 1
            except EngineError as error:
                seen[f"{what}:{error.reason}"] += 1
            else:
                seen[what] += 1
        return seen, digests

    def _change_once(self, rng: random.Random, what: str, digests: dict[int, bytes]) -> None:
        desk = self._engine.adapters
        if what == "load":
            new = NewAdapter(rng.choice("ab"), "x", rng.choice(SCALES), rng.choice(self._contents))
            adapter = wait(desk.load(new))
            digests[adapter.adapter_id] = adapter.facts.digest
        elif what == "scale":
            wait(desk.set_scales(self._draw_set(rng)))
        elif ids := sorted(desk.ids):
            done = desk.unload(rng.choice(ids), fail_if_busy=rng.random() < 0.3)
            try:
                done.result(rng.choice([0.01, 1.0]))
            except TimeoutError:
                done.cancel()
                raise

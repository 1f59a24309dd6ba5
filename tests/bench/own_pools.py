"""`python -m tests.bench.own_pools MODEL THREADS KERNELS CACHE`: our pools, split anew."""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine.loading import Loaded, load_engine
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport, RebuildWish, Stage
from engine.requests import Request, SamplingParams
from engine.types import EngineConfig, Event, Failed, Finished
from tests.bench.child import answer_all

_CONTEXT_TOKENS = 8192
_CHUNK_TOKENS = 512
# The prompt that is held, so that something is copied.
_HELD_TOKENS = 2000


class OwnPools:
    """A running engine whose kv pool is given other sizes; times are seconds."""

    def __init__(self) -> None:
        self._ends: queue.Queue[Event] = queue.Queue()
        self._loaded: Loaded

    def open(self, loaded: Loaded) -> None:
        """Starts the engine and lets it hold a prompt."""
        self._loaded = loaded
        loaded.engine.start()
        self._ask()

    def sink(self, events: Sequence[tuple[str, Event]]) -> None:
        """Takes a step's events."""
        for _, event in events:
            if isinstance(event, Finished | Failed):
                self._ends.put(event)

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Measures what is asked for."""
        match question:
            case {"do": "rebuild", "bytes": num_bytes}:
                return self._rebuild(num_bytes)
            case _:
                raise ValueError(f"no such question: {question}")

    def _rebuild(self, num_bytes: int) -> dict[str, float]:
        """Half of the bytes first, then all of them, which is what is measured.

        `closed_s` is the time in which nothing was served, `copies_s` its part for the copies of
        what was held; `compiles` happened once it was open again.
        """
        page_bytes = self._loaded.plan.page_bytes
        self._change(num_bytes // 2 // page_bytes)
        report = self._change(num_bytes // page_bytes)
        times = dict(report.stages)
        closed_s = sum(
            times[stage] for stage in Stage if stage not in (Stage.VALIDATE, Stage.COMPILE)
        )
        before = self._loaded.runner.compiles
        cached = self._ask()
        return {
            "closed_s": closed_s,
            "copies_s": times[Stage.COPY_OUT] + times[Stage.COPY_BACK],
            "compiles": self._loaded.runner.compiles - before,
            "cached": cached,
        }

    def _change(self, pages: int) -> RebuildReport:
        wish = RebuildWish(PoolSizes(kv=pages), f"to-{pages}")
        return self._loaded.engine.rebuild(wish).result()

    def _ask(self) -> int:
        """Returns how many tokens of the prompt were cached."""
        prompt = tuple((7 * i) % 1000 + 100 for i in range(_HELD_TOKENS))
        sampling = SamplingParams(temperature=0.0)
        self._loaded.engine.submit(Request("r", prompt, sampling=sampling, max_tokens=8))
        end = self._ends.get()
        assert isinstance(end, Finished), end
        return end.cached_tokens


def main(model: str, threads: str, kernel_kind: str, cache: str) -> None:
    """Answers until stdin ends."""
    config = EngineConfig(
        context_tokens=_CONTEXT_TOKENS,
        num_slots=4,
        chunk_tokens=_CHUNK_TOKENS,
        threads=int(threads),
        kernels=kernel_kind,
        compile_cache=cache,
    )
    pools = OwnPools()
    pools.open(load_engine(model, config, pools.sink))
    answer_all(pools.answer)


if __name__ == "__main__":
    main(*sys.argv[1:])

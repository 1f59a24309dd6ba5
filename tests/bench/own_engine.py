"""`python -m tests.bench.own_engine MODEL THREADS KERNELS CACHE [EXPERTS]`: our runner's steps.

What `llama-bench` does: tokens that mean nothing, no sampling, no text. EXPERTS is how many of the
model's are in memory, all unless it is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.loading import Loaded, load_engine
from engine.step import SequenceWork, StepBatch
from engine.types import EngineConfig, Event
from tests.bench import kernels
from tests.bench.child import answer_all

MAX_ROWS = 8
CONTEXT_TOKENS = 2048
MAX_CHUNK = 512
_ATTENTION_STEPS = 16


class OwnEngine:
    """A loaded model whose engine is never started: its runner is ours."""

    def __init__(self, loaded: Loaded, threads: int) -> None:
        self._loaded = loaded
        self._threads = threads
        self._runner = loaded.runner
        self._page_tokens = loaded.plan.page_tokens

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Runs what is asked for; rates are tokens per second."""
        match question:
            case {"do": "prefill", "tokens": tokens}:
                return self.prefill(tokens)
            case {"do": "decode", "rows": rows, "steps": steps}:
                return self.decode(rows, steps)
            case {"do": "weight_bytes"}:
                return self._loaded.weights.arena.nbytes
            case {"do": "experts"}:
                return self.expert_slots()
            case {"do": "attention_rate"}:
                return self.attention_rate()
            case {"do": "read_rate", "bytes": num_bytes}:
                return kernels.read_rate(num_bytes, self._threads)
            case {"do": "f32_product_rate", "rows": rows}:
                return kernels.f32_product_rate(rows)
            case {"do": "matrix_rates", "rows": rows}:
                return kernels.matrix_rates(self._loaded, rows)
            case _:
                raise ValueError(f"no such question: {question}")

    def prefill(self, tokens: int) -> float:
        """The rate of one prompt in one chunk; only its last logits are wanted."""
        ids = [(7 * i) % 1000 + 100 for i in range(tokens)]
        return tokens / self._timed([StepBatch((), self._work(0, 0, ids))])

    def decode(self, rows: int, steps: int) -> float:
        """The rate of `rows` sequences together, from one token on."""
        batches = [
            StepBatch(
                tuple(self._work(row, at, [(31 * at + row) % 1000 + 100]) for row in range(rows)),
                None,
            )
            for at in range(steps + 1)
        ]
        self._timed(batches[:1])
        return rows * steps / self._timed(batches[1:])

    def expert_slots(self) -> dict[str, float]:
        """The bounds of the pool, and the share of experts that were in memory so far."""
        view = self._loaded.weights.experts
        assert view is not None, "a model without experts"
        shape, figures = view.pool.shape, view.pool.store.figures
        share = figures.hits / figures.lookups if figures.lookups else 1.0
        return {"floor": shape.floor, "ceiling": shape.ceiling, "hit_rate": share}

    def attention_rate(self) -> float:
        """Bytes of keys and values per second: what 8 rows take more when they hold more."""
        few, many = 8, CONTEXT_TOKENS // MAX_ROWS - _ATTENTION_STEPS
        times = [
            min(self._timed(self._decodes_at(start)) for _ in range(3)) for start in (few, many)
        ]
        plan = self._loaded.plan
        page_bytes = plan.page_bytes + (plan.window.page_bytes if plan.window else 0)
        token_bytes = page_bytes // self._page_tokens
        more = MAX_ROWS * _ATTENTION_STEPS * (many - few) * token_bytes
        return more / max(times[1] - times[0], 1e-9)

    def _decodes_at(self, start: int) -> list[StepBatch]:
        return [
            StepBatch(tuple(self._work(row, at, [100]) for row in range(MAX_ROWS)), None)
            for at in range(start, start + _ATTENTION_STEPS)
        ]

    def _timed(self, batches: Sequence[StepBatch]) -> float:
        begun_s = time.perf_counter()
        for batch in batches:
            self._runner.run(batch)
        return time.perf_counter() - begun_s

    def _work(self, row: int, start: int, tokens: Sequence[int]) -> SequenceWork:
        per_row = CONTEXT_TOKENS // MAX_ROWS // self._page_tokens
        count = -(-(start + len(tokens)) // self._page_tokens)
        pages = tuple(range(1 + row * per_row, 1 + row * per_row + count))
        state_id = 1 + row if self._runner.state_layout else 0
        return SequenceWork(
            tokens, start, pages, wants_logits=True, window_pages=pages, state_id=state_id
        )


def main(model: str, threads: str, kernel_kind: str, cache: str, experts: str = "") -> None:
    """Answers until stdin ends."""
    config = EngineConfig(
        context_tokens=CONTEXT_TOKENS,
        num_slots=MAX_ROWS,
        chunk_tokens=MAX_CHUNK,
        threads=int(threads),
        kernels=kernel_kind,
        compile_cache=cache,
        moe_cache_slots=int(experts) if experts else None,
    )
    answer_all(OwnEngine(load_engine(model, config, _ignore), int(threads)).answer)


def _ignore(events: Sequence[tuple[str, Event]]) -> None:
    del events


if __name__ == "__main__":
    main(*sys.argv[1:])

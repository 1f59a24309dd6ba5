"""JAX runners of tiny files, and sequences to run on them without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.content import AdapterContent
from engine.gguf.reader import GgufFile
from engine.model.architectures import read_spec
from engine.model.weights import load_weights
from engine.runner import JaxRunner, RunnerConfig
from engine.step import RowLogits, SequenceWork, StepBatch

NO_ADAPTERS = AdapterCapacity()


def open_runner(
    path: Path,
    *,
    max_rows: int = 1,
    max_chunk: int = 32,
    context_tokens: int = 512,
    num_pages: int = 80,
    page_tokens: int = 16,
    kv_dtype: str = "f32",
    num_states: int = 8,
    is_native: bool = False,
    adapters: AdapterCapacity = NO_ADAPTERS,
    expert_slots: int | None = None,
    embeds: bool = False,
) -> JaxRunner:
    """Loads a file into a runner that is not warm: compiling takes about 2 s per program.

    A model with windows has as many window pages as others, one without recurrent layers no states;
    one with experts has `expert_slots` of them in memory (None: all).
    """
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        num_window_pages = num_pages if spec.num_window_layers else 0
        config = RunnerConfig(
            max_rows,
            max_chunk,
            context_tokens,
            num_pages,
            page_tokens,
            kv_dtype,
            num_window_pages,
            adapters,
            num_states if spec.num_recurrent_layers else 0,
            embeds,
        )
        weights = load_weights(spec, file, is_native=is_native, expert_slots=expert_slots)
        return JaxRunner(spec, weights, config)


def write_whole(runner: JaxRunner, place: int, content: AdapterContent) -> None:
    """Puts an adapter into a place without a step in between."""
    for _ in runner.write_adapter(place, content):
        pass


@dataclass
class Lane:
    """A sequence on pages of its own, which cover as many tokens as it will hold.

    Its window pages have the same ids in their own pool and are never freed. Models with recurrent
    layers use its state.
    """

    pages: Sequence[int]
    held: list[int] = field(default_factory=list[int])
    adapters: Sequence[tuple[int, float]] = ()
    state_id: int = 1

    def window_pages(self, start: int, end: int) -> Sequence[int]:
        """The table of the swa pool for a step over tokens `start` to `end`."""
        return self.pages

    def work(self, tokens: Iterable[int], *, wants_logits: bool = True) -> SequenceWork:
        """The next tokens of the sequence; they count as held from now on."""
        start, new = len(self.held), tuple(tokens)
        self.held += new
        table = self.window_pages(start, len(self.held))
        return SequenceWork(
            new, start, self.pages, wants_logits, table, self.adapters, self.state_id
        )


def decode(runner: JaxRunner, *works: SequenceWork) -> list[RowLogits]:
    """Runs one step of decode rows that all want logits."""
    return [row for row in runner.run(StepBatch(works, None)) if row is not None]


def prefill(runner: JaxRunner, lane: Lane, tokens: Sequence[int], chunk: int) -> RowLogits:
    """Runs tokens in chunks of a size; only the last chunk asks for logits."""
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        is_last = first + chunk >= len(tokens)
        (row,) = runner.run(StepBatch((), lane.work(part, wants_logits=is_last)))
        if row is not None:
            return row
    raise ValueError("no tokens")


def logprobs(row: RowLogits) -> npt.NDArray[np.float64]:
    """Natural log-probabilities of all tokens."""
    return row.full().astype(np.float64) - row.log_sum_exp

"""What one step computes, as plain data: the seam between the scheduler and whatever runs it.

The scheduler plans a `StepBatch`; a `Runner` evaluates it and returns the logits that were asked
for. The JAX runner and the fake one of the tests both stand behind these types, so this module
must not import either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class PoolLost(RuntimeError):
    """A step failed and took the content of every page with it; the runner has empty pools again."""


@dataclass(frozen=True)
class SequenceWork:
    """The tokens of one sequence to evaluate in this step.

    `tokens` go to positions `start .. start + len(tokens) - 1`; `pages` are the ids of the KV
    pages that cover positions 0 .. end, in order, and hold everything before `start`.
    `window_pages` are the same of the swa pool, with 0 for pages that lie behind the window; empty
    for models without sliding-window layers. `wants_logits` asks for the logits after the last
    token.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool
    window_pages: Sequence[int] = ()


@dataclass(frozen=True)
class StepBatch:
    """One step: `decodes` of one token each, and at most one prefill `chunk` beside them."""

    decodes: tuple[SequenceWork, ...]
    chunk: SequenceWork | None

    @property
    def num_tokens(self) -> int:
        """Tokens evaluated by the step."""
        return len(self.decodes) + (len(self.chunk.tokens) if self.chunk else 0)


class RowLogits(Protocol):
    """The logits of one row, raw (before any bias, penalty or sampler), as float32.

    `top` is what the device sends up unasked; the rest may cost a transfer.
    """

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    @property
    def is_finite(self) -> bool:
        """False if any logit is NaN or infinite: the caller fails that request alone."""
        ...

    @property
    def log_sum_exp(self) -> float:
        """Natural log of the sum of exp over all logits."""
        ...

    def top(self) -> tuple[IntArray, FloatArray]:
        """The best candidates (ids, logits), sorted by falling logit, ties by rising id.

        At least min(vocab_size, 64) of them.
        """
        ...

    def at(self, token_ids: IntArray) -> FloatArray:
        """The logits of some ids."""
        ...

    def full(self) -> FloatArray:
        """All logits, in id order, read-only."""
        ...


class Runner(Protocol):
    """Evaluates steps. Owned by the engine thread; nothing else may call it after `warm_up`."""

    @property
    def max_decodes(self) -> int:
        """The most decode rows of one step."""
        ...

    @property
    def max_chunk(self) -> int:
        """The most tokens of one prefill chunk."""
        ...

    @property
    def compiles(self) -> int:
        """Programs compiled so far; flat after `warm_up`."""
        ...

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Evaluates a step; one entry per decode, then one for the chunk if there is one.

        An entry is None where no logits were asked for. Raises whatever the device raises; the
        caller then fails the requests of this batch and no others.

        Raises:
            PoolLost: the step failed and no page of any sequence holds anything any more. The
                runner can go on.
        """
        ...

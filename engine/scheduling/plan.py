"""Which rows a step evaluates: decodes first, then one chunk of a prompt beside them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduling.row import Row
from engine.step import RunningStep, StepBatch


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, in the order of the runner's results, and the chunk's length.

    `passed` is the older prompt that waits while a younger one has the chunk.
    """

    decodes: tuple[Row, ...]
    chunk: Row | None
    chunk_tokens: int
    passed: Row | None = None
    texts: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows; the chunk's is the last, or there are only an encoder's `texts`."""
        chunk = () if self.chunk is None else (self.chunk,)
        return (*self.decodes, *chunk, *self.texts)

    def length(self, row: Row) -> int:
        """Returns how many tokens of one of its rows the step evaluates."""
        return row.next_length(1 if row in self.decodes else self.chunk_tokens)

    def batch(self) -> StepBatch:
        """Returns what the runner is to evaluate."""
        return StepBatch(
            decodes=tuple(row.work(1) for row in self.decodes),
            chunk=self.chunk.work(self.chunk_tokens) if self.chunk else None,
            texts=tuple(row.work(self.chunk_tokens) for row in self.texts),
        )


@dataclass(frozen=True)
class Flight:
    """A step that the device has, and what it was given."""

    plan: StepPlan
    batch: StepBatch
    step: RunningStep


def plan_step(rows: Sequence[Row], *, max_decodes: int, chunk_tokens: int) -> StepPlan | None:
    """Returns the next step, or None if nothing runs.

    Prompts are served first come first, but one that the chunk would complete passes the oldest,
    so that a short prompt does not wait for the whole of a long one; the oldest is passed once in
    a row at most, so that short ones cannot keep it waiting for ever. Of the decodes those that
    were not evaluated for longest go, so that with more of them than the runner takes every row
    gets its turn.
    """
    in_turn = sorted(rows, key=lambda row: (row.last_turn, row.task_id))
    decodes = tuple(row for row in in_turn if row.is_decode)[:max_decodes]
    prompts = sorted((row for row in rows if not row.is_decode), key=lambda row: row.task_id)
    if not decodes and not prompts:
        return None
    chunk = _next_prompt(prompts, chunk_tokens)
    passed = prompts[0] if chunk is not None and chunk is not prompts[0] else None
    return StepPlan(decodes, chunk, chunk_tokens, passed)


def plan_texts(rows: Sequence[Row], *, max_texts: int, max_tokens: int) -> StepPlan | None:
    """Returns an encoder's next step, or None if nothing runs.

    It takes whole texts in order of arrival, as many as fit; one that does not fit beside those
    before it is the first of the next step.
    """
    texts: list[Row] = []
    num_tokens = 0
    for row in sorted(rows, key=lambda row: row.task_id):
        if len(texts) < max_texts and num_tokens + row.num_pending <= max_tokens:
            texts.append(row)
            num_tokens += row.num_pending
    return StepPlan((), None, max_tokens, texts=tuple(texts)) if texts else None


def _next_prompt(prompts: Sequence[Row], chunk_tokens: int) -> Row | None:
    """Whose turn it is, of prompts in order of arrival."""
    if not prompts:
        return None
    oldest = prompts[0]
    if oldest.was_passed:
        return oldest
    return next((row for row in prompts if row.num_pending <= chunk_tokens), oldest)

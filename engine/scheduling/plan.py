"""Which rows a step evaluates: decodes, prompts of a few tokens, a chunk of a longer one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduling.row import Row
from engine.step import RowLogits, RunningStep, SequenceWork, StepBatch

# Prompts of so few tokens are evaluated as rows of one token: measured, docs/benchmarks.md.
SHORT_TOKENS = 4
# A longer chunk takes several times as long as a step of rows.
BRIEF_TOKENS = 32


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, in the order of the runner's results, and the chunk's length.

    Each token of `shorts`, prompts of a few tokens, is evaluated as a decode is. `passed` is the
    prompt that waits while a younger one has the chunk, or while others begin without any.
    """

    decodes: tuple[Row, ...]
    chunk: Row | None
    chunk_tokens: int
    passed: Row | None = None
    texts: tuple[Row, ...] = ()
    shorts: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows; the chunk's is the last, or there are only an encoder's `texts`."""
        chunk = () if self.chunk is None else (self.chunk,)
        return (*self.decodes, *self.shorts, *chunk, *self.texts)

    def length(self, row: Row) -> int:
        """Returns how many tokens of one of its rows the step evaluates."""
        return row.next_length(1 if row in self.decodes else self.chunk_tokens)

    def works(self) -> tuple[SequenceWork, ...]:
        """Returns what each of the rows is to do, in their order."""
        others = self.rows[len(self.decodes) :]
        return (
            *(row.work(1) for row in self.decodes),
            *(row.work(self.chunk_tokens) for row in others),
        )

    def batch(self, works: Sequence[SequenceWork]) -> StepBatch:
        """Returns what the runner is to evaluate, made of `works`."""
        num_decodes, num_rows = len(self.decodes), len(self.decodes) + len(self.shorts)
        tokens = [one for work in works[num_decodes:num_rows] for one in work.one_by_one()]
        rest = works[num_rows:]
        return StepBatch(
            decodes=(*works[:num_decodes], *tokens),
            chunk=rest[0] if self.chunk else None,
            texts=() if self.chunk else tuple(rest),
        )

    def results(
        self, works: Sequence[SequenceWork], logits: Sequence[RowLogits | None]
    ) -> list[tuple[Row, SequenceWork, RowLogits | None]]:
        """Returns each row with its work and, of the runner's results, what is after its last token."""
        num_decodes, num_rows = len(self.decodes), len(self.decodes) + len(self.shorts)
        ends = list(logits[:num_decodes])
        end = num_decodes
        for work in works[num_decodes:num_rows]:
            end += len(work.tokens)
            ends += logits[end - 1 : end]
        return list(zip(self.rows, works, [*ends, *logits[end:]], strict=True))


@dataclass(frozen=True)
class Flight:
    """A step that the device has, and what its rows do in it."""

    plan: StepPlan
    works: tuple[SequenceWork, ...]
    step: RunningStep


def plan_step(rows: Sequence[Row], *, max_decodes: int, chunk_tokens: int) -> StepPlan | None:
    """Returns the next step, or None if nothing runs.

    Of the decodes those that were not evaluated for longest go, so that with more of them than the
    runner takes every row gets its turn. What they leave is for prompts of a few tokens, so that
    several begin in one step.

    Longer prompts are served first come first, but one that the chunk would complete passes the
    oldest, so that a short prompt does not wait for the whole of a long one; the oldest is passed
    once in a row at most, so that short ones cannot keep it waiting for ever. For the same reasons
    a long chunk waits for the step in which a row begins: its first token would wait for the chunk.
    """
    in_turn = sorted(rows, key=lambda row: (row.last_turn, row.task_id))
    decodes = tuple(row for row in in_turn if row.is_decode)[:max_decodes]
    prompts = sorted((row for row in rows if not row.is_decode), key=lambda row: row.task_id)
    if not decodes and not prompts:
        return None
    most = min(SHORT_TOKENS, chunk_tokens)
    shorts = _shorts(prompts, most, num_free=max_decodes - len(decodes))
    longer = [row for row in prompts if row not in shorts]
    chunk = _next_prompt(longer, chunk_tokens)
    begins = bool(shorts) or any(row.is_new for row in decodes)
    if chunk is not None and begins and _may_wait(chunk, chunk_tokens):
        return StepPlan(decodes, None, chunk_tokens, chunk, shorts=shorts)
    passed = longer[0] if chunk is not None and chunk is not longer[0] else None
    return StepPlan(decodes, chunk, chunk_tokens, passed, shorts=shorts)


def _may_wait(prompt: Row, chunk_tokens: int) -> bool:
    return not prompt.was_passed and prompt.next_length(chunk_tokens) > BRIEF_TOKENS


def _shorts(prompts: Sequence[Row], most: int, *, num_free: int) -> tuple[Row, ...]:
    """The prompts of `most` tokens that take `num_free` rows of one token, as far as they go."""
    shorts: list[Row] = []
    for row in prompts:
        if row.fits_rows(most) and row.num_pending <= num_free:
            shorts.append(row)
            num_free -= row.num_pending
    return tuple(shorts)


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

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.adapters.effective import EffectiveSet, SetMember
from engine.pooling import StatePooling
from engine.requests import Pooling
from engine.scheduling.plan import BRIEF_TOKENS, SHORT_TOKENS, StepPlan, plan_step, plan_texts
from engine.scheduling.row import Row
from engine.step import RowLogits, StepBatch
from tests.fake_logits import FakeRow
from tests.unit.engine.scheduling.rows import make_row


def decoding(task_id: int, last_turn: int = 0) -> Row:
    return make_row(task_id=task_id, sampled=(7,), held=3, last_turn=last_turn)


def prefilling(task_id: int, last_turn: int = -1, prompt_tokens: int = 9) -> Row:
    return make_row(task_id=task_id, prompt_tokens=prompt_tokens, last_turn=last_turn)


def plan(rows: list[Row], *, max_decodes: int = 8, chunk_tokens: int = 4) -> StepPlan:
    made = plan_step(rows, max_decodes=max_decodes, chunk_tokens=chunk_tokens)
    assert made is not None
    return made


def batch_of(step: StepPlan) -> StepBatch:
    return step.batch(step.works())


def test_nothing_runs_without_rows() -> None:
    assert plan_step([], max_decodes=8, chunk_tokens=4) is None


def test_decodes_and_one_chunk_share_a_step() -> None:
    rows = [prefilling(0), decoding(1), prefilling(2), decoding(3)]
    step = plan(rows)
    assert [row.task_id for row in step.rows] == [1, 3, 0]
    batch = batch_of(step)
    assert [(work.tokens, work.start) for work in batch.decodes] == [([7], 3), ([7], 3)]
    assert batch.chunk is not None
    assert batch.chunk.tokens == [10, 11, 12, 13]
    assert not batch.chunk.wants_logits
    assert batch.num_tokens == 6


def test_the_last_chunk_wants_logits() -> None:
    row = make_row(task_id=0, prompt_tokens=9, held=4)
    chunk = batch_of(plan([row], chunk_tokens=8)).chunk
    assert chunk is not None
    assert (chunk.tokens, chunk.start, chunk.wants_logits) == ([14, 15, 16, 17, 18], 4, True)


def test_one_pending_prompt_token_costs_a_decode() -> None:
    step = plan([make_row(task_id=0, prompt_tokens=5, held=4), prefilling(1)])
    assert [row.task_id for row in step.decodes] == [0]
    assert step.chunk is not None
    assert batch_of(step).decodes[0].tokens == [14]


@pytest.mark.parametrize(("turn", "other_turn"), [(7, 6), (6, 7), (-1, -1), (9, -1)])
def test_the_oldest_prompt_has_the_chunk_until_it_is_done(turn: int, other_turn: int) -> None:
    rows = [prefilling(3, last_turn=other_turn), prefilling(2, last_turn=turn), decoding(1)]
    assert plan(rows).chunk is rows[1]


def test_a_prompt_that_one_chunk_completes_passes_the_oldest() -> None:
    rows = [prefilling(0), prefilling(1), prefilling(2, prompt_tokens=8), decoding(3)]
    step = plan(rows, chunk_tokens=8)
    assert step.chunk is rows[2]
    assert step.passed is rows[0]


def test_the_oldest_prompt_is_passed_once_in_a_row_at_most() -> None:
    rows = [prefilling(0), prefilling(1, prompt_tokens=7), prefilling(2, prompt_tokens=8)]
    rows[0].was_passed = True
    step = plan(rows, chunk_tokens=8)
    assert step.chunk is rows[0]
    assert step.passed is None


def test_more_decodes_than_the_runner_takes_rotate() -> None:
    rows = [decoding(task_id) for task_id in range(5)]
    served: list[int] = []
    for _ in range(5):
        for row in plan(rows, max_decodes=2).decodes:
            served.append(row.task_id)
            row.last_turn = len(served)
    assert sorted(served) == sorted([*range(5)] * 2)


def test_a_resumed_row_prefills_its_prompt_and_its_own_tokens() -> None:
    row = make_row(task_id=0, prompt_tokens=3, sampled=(7, 8), held=0)
    chunk = batch_of(plan([row], chunk_tokens=99)).chunk
    assert chunk is not None
    assert (chunk.tokens, chunk.start, chunk.wants_logits) == ([10, 11, 12, 7, 8], 0, True)
    row.home.tokens += [10, 11]
    assert batch_of(plan([row], chunk_tokens=2)).chunk is not None
    assert row.work(2).tokens == [12, 7]


def short(task_id: int, prompt_tokens: int = 3) -> Row:
    return make_row(task_id=task_id, prompt_tokens=prompt_tokens)


def task_ids(rows: Sequence[Row]) -> list[int]:
    return [row.task_id for row in rows]


# Prompts of a few tokens.


def test_short_prompts_are_rows_beside_decodes_and_a_chunk() -> None:
    rows = [prefilling(0), short(1), decoding(2), short(3, prompt_tokens=SHORT_TOKENS)]
    step = plan(rows)
    assert (task_ids(step.decodes), task_ids(step.shorts)) == ([2], [1, 3])
    assert task_ids(step.rows) == [2, 1, 3, 0]
    assert [step.length(row) for row in step.rows] == [1, 3, SHORT_TOKENS, 4]
    batch = batch_of(step)
    placed = [(work.pages, list(work.tokens), work.start) for work in batch.decodes]
    assert placed == [
        ((3,), [7], 3),
        *(((2,), [10 + i], i) for i in range(3)),
        *(((4,), [10 + i], i) for i in range(SHORT_TOKENS)),
    ]
    wanted = [work.wants_logits for work in batch.decodes]
    assert wanted == [True, *[False] * 2, True, *[False] * 3, True]
    assert batch.chunk is not None
    assert batch.chunk.tokens == [10, 11, 12, 13]


def test_what_is_left_of_a_prompt_may_be_short() -> None:
    row = make_row(task_id=0, prompt_tokens=9, held=6)
    step = plan([row, prefilling(1)])
    assert (step.shorts, task_ids(step.rows)) == ((row,), [0, 1])
    assert [(*work.tokens, work.start) for work in batch_of(step).decodes] == [
        (16, 6),
        (17, 7),
        (18, 8),
    ]


def test_a_prompt_that_was_preempted_is_short_with_what_it_had_said() -> None:
    row = make_row(task_id=0, prompt_tokens=2, sampled=(7, 8), held=0)
    step = plan([row])
    assert step.shorts == (row,)
    assert [token for work in batch_of(step).decodes for token in work.tokens] == [10, 11, 7, 8]


@pytest.mark.parametrize(("num_free", "shorts", "chunk"), [(8, [1, 2], 3), (5, [1], 2), (2, [], 1)])
def test_short_prompts_take_no_more_rows_than_the_decodes_leave(
    num_free: int, shorts: list[int], chunk: int
) -> None:
    step = plan([decoding(0), *(short(i) for i in (3, 1, 2))], max_decodes=1 + num_free)
    assert (task_ids(step.decodes), task_ids(step.shorts)) == ([0], shorts)
    assert len(batch_of(step).decodes) == 1 + 3 * len(shorts)
    # One of those that found no rows has the chunk, the others wait.
    assert step.chunk is not None
    assert step.chunk.task_id == chunk


def test_decodes_come_before_short_prompts() -> None:
    step = plan([short(0), *(decoding(i) for i in range(1, 9))])
    assert (len(step.decodes), step.shorts) == (8, ())
    assert step.chunk is not None
    assert step.chunk.task_id == 0


def test_short_prompts_that_wait_begin_in_the_order_of_their_arrival() -> None:
    rows = [short(task_id) for task_id in range(9)]
    begun: list[int] = []
    while rows:
        step = plan(rows)
        for row in step.rows:
            begun.append(row.task_id)
            rows.remove(row)
    assert begun == [*range(9)]


def test_the_result_of_a_short_prompt_is_what_is_after_its_last_token() -> None:
    rows = [prefilling(0), short(1), decoding(2), short(3, prompt_tokens=2)]
    step = plan(rows, chunk_tokens=9)
    # 2 | 1 1 1 | 3 3 | 0
    logits = [FakeRow(np.full(2, i, np.float32)) for i in range(7)]
    given: list[RowLogits | None] = [logits[0], None, None, logits[3], None, *logits[5:]]
    works = step.works()
    results = step.results(works, given)
    assert results == [
        (rows[2], works[0], logits[0]),
        (rows[1], works[1], logits[3]),
        (rows[3], works[2], logits[5]),
        (rows[0], works[3], logits[6]),
    ]
    assert [list(work.tokens) for work in works[1:3]] == [[10, 11, 12], [10, 11]]
    assert all(work.wants_logits for work in works)


def test_too_few_results_are_a_mistake() -> None:
    step = plan([short(0), short(1)])
    for num_results in (5, 7):
        with pytest.raises(ValueError, match="zip"):
            step.results(step.works(), [None] * num_results)


def with_state(row: Row) -> None:
    row.home.state_id = 1


def with_pooling(row: Row) -> None:
    row.pooling = StatePooling(Pooling.MEAN)


def with_a_stop_inside(row: Row) -> None:
    row.stop_at = 2


def with_an_adapter_from_inside(row: Row) -> None:
    row.adapters = EffectiveSet((SetMember(0, 0, b"digest", 1.0),), active_from=2)


def with_room_for_a_part(row: Row) -> None:
    row.max_held = 2


@pytest.mark.parametrize(
    "change",
    [
        with_state,
        with_pooling,
        with_a_stop_inside,
        with_an_adapter_from_inside,
        with_room_for_a_part,
    ],
)
def test_what_needs_a_chunk_is_not_short(change: Callable[[Row], None]) -> None:
    row = short(0)
    assert plan([row]).shorts == (row,)
    change(row)
    step = plan([row])
    assert (step.shorts, step.chunk) == ((), row)
    chunk = batch_of(step).chunk
    assert chunk is not None
    # All three tokens, or those before the change.
    assert len(chunk.tokens) == (3 if change in (with_state, with_pooling) else 2)


def test_one_more_token_than_a_short_prompt_has_needs_a_chunk() -> None:
    row = short(0, prompt_tokens=SHORT_TOKENS + 1)
    assert plan([row], chunk_tokens=99).chunk is row


def test_no_short_prompt_is_longer_than_a_chunk() -> None:
    row = short(0)
    step = plan([row], chunk_tokens=2)
    assert (step.shorts, step.chunk) == ((), row)


def test_short_prompts_pass_nobody() -> None:
    rows = [prefilling(0), short(1), prefilling(2, prompt_tokens=8)]
    step = plan(rows, chunk_tokens=8)
    assert (task_ids(step.shorts), step.chunk, step.passed) == ([1], rows[2], rows[0])
    rows[0].was_passed = True
    step = plan(rows, chunk_tokens=8)
    assert (task_ids(step.shorts), step.chunk, step.passed) == ([1], rows[0], None)
    step = plan(rows[:2], chunk_tokens=8)
    assert (task_ids(step.shorts), step.chunk, step.passed) == ([1], rows[0], None)
    # Nor is one passed that is in the step itself.
    step = plan([short(0), prefilling(1)])
    assert (task_ids(step.shorts), step.passed) == ([0], None)


def test_a_short_prompt_that_waits_is_not_passed_by_a_longer_one() -> None:
    """It is the oldest of those that a chunk completes."""
    rows = [short(0), prefilling(1), *(decoding(i) for i in range(2, 9))]
    step = plan(rows, chunk_tokens=9)
    assert (step.shorts, step.chunk, step.passed) == ((), rows[0], None)


@pytest.mark.parametrize("begins", [short(2), make_row(task_id=2, prompt_tokens=5, held=4)])
@pytest.mark.parametrize("more", [0, 900])
def test_a_row_that_begins_does_not_wait_for_a_long_chunk(begins: Row, more: int) -> None:
    long = prefilling(0, prompt_tokens=BRIEF_TOKENS + 1 + more)
    rows = [long, decoding(1), begins]
    step = plan(rows, chunk_tokens=512)
    assert sorted(task_ids(step.rows)) == [1, 2]
    assert (step.chunk, step.passed) == (None, long)
    # Once in a row at most: others that begin then go along with it.
    long.was_passed = True
    step = plan(rows, chunk_tokens=512)
    assert sorted(task_ids(step.rows)) == [0, 1, 2]
    assert (step.chunk, step.passed) == (long, None)


def test_a_row_that_begins_goes_along_with_a_brief_chunk() -> None:
    brief = prefilling(0, prompt_tokens=BRIEF_TOKENS)
    step = plan([brief, short(1)], chunk_tokens=512)
    assert (step.chunk, task_ids(step.shorts), step.passed) == (brief, [1], None)


def test_rows_that_have_begun_go_along_with_a_long_chunk() -> None:
    long = prefilling(0, prompt_tokens=900)
    step = plan([long, decoding(1)], chunk_tokens=512)
    assert (step.chunk, step.passed) == (long, None)


def test_a_younger_prompt_that_waits_for_a_row_is_the_next() -> None:
    rows = [prefilling(0, prompt_tokens=900), prefilling(1, prompt_tokens=200), short(2)]
    step = plan(rows, chunk_tokens=512)
    assert (step.chunk, step.passed) == (None, rows[1])
    rows[1].was_passed = True
    step = plan([*rows[:2], short(3)], chunk_tokens=512)
    assert (step.chunk, step.passed) == (rows[1], rows[0])


def test_an_encoders_step_takes_whole_texts_while_they_fit() -> None:
    rows = [prefilling(i, prompt_tokens=length) for i, length in enumerate((5, 9, 3, 2, 1))]
    step = plan_texts(rows[::-1], max_texts=3, max_tokens=12)
    assert step is not None
    # The second does not fit beside the first; it is the first of the next step.
    assert [row.task_id for row in step.rows] == [0, 2, 3]
    assert [len(text.tokens) for text in batch_of(step).texts] == [5, 3, 2]
    assert [step.length(row) for row in step.rows] == [5, 3, 2]
    following = plan_texts([rows[1], rows[4]], max_texts=3, max_tokens=12)
    assert following is not None
    assert following.rows == (rows[1], rows[4])
    assert plan_texts([], max_texts=3, max_tokens=12) is None

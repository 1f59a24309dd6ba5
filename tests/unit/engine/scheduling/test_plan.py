from __future__ import annotations

import pytest

from engine.scheduling.plan import StepPlan, plan_step, plan_texts
from engine.scheduling.row import Row
from tests.unit.engine.scheduling.rows import make_row


def decoding(task_id: int, last_turn: int = 0) -> Row:
    return make_row(task_id=task_id, sampled=(7,), held=3, last_turn=last_turn)


def prefilling(task_id: int, last_turn: int = -1, prompt_tokens: int = 9) -> Row:
    return make_row(task_id=task_id, prompt_tokens=prompt_tokens, last_turn=last_turn)


def plan(rows: list[Row], *, max_decodes: int = 8, chunk_tokens: int = 4) -> StepPlan:
    made = plan_step(rows, max_decodes=max_decodes, chunk_tokens=chunk_tokens)
    assert made is not None
    return made


def test_nothing_runs_without_rows() -> None:
    assert plan_step([], max_decodes=8, chunk_tokens=4) is None


def test_decodes_and_one_chunk_share_a_step() -> None:
    rows = [prefilling(0), decoding(1), prefilling(2), decoding(3)]
    step = plan(rows)
    assert [row.task_id for row in step.rows] == [1, 3, 0]
    batch = step.batch()
    assert [(work.tokens, work.start) for work in batch.decodes] == [([7], 3), ([7], 3)]
    assert batch.chunk is not None
    assert batch.chunk.tokens == [10, 11, 12, 13]
    assert not batch.chunk.wants_logits
    assert batch.num_tokens == 6


def test_the_last_chunk_wants_logits() -> None:
    row = make_row(task_id=0, prompt_tokens=9, held=6)
    chunk = plan([row]).batch().chunk
    assert chunk is not None
    assert (chunk.tokens, chunk.start, chunk.wants_logits) == ([16, 17, 18], 6, True)


def test_one_pending_prompt_token_costs_a_decode() -> None:
    step = plan([make_row(task_id=0, prompt_tokens=5, held=4), prefilling(1)])
    assert [row.task_id for row in step.decodes] == [0]
    assert step.chunk is not None
    assert step.batch().decodes[0].tokens == [14]


@pytest.mark.parametrize(("turn", "other_turn"), [(7, 6), (6, 7), (-1, -1), (9, -1)])
def test_the_oldest_prompt_has_the_chunk_until_it_is_done(turn: int, other_turn: int) -> None:
    rows = [prefilling(3, last_turn=other_turn), prefilling(2, last_turn=turn), decoding(1)]
    assert plan(rows).chunk is rows[1]


def test_a_prompt_that_one_chunk_completes_passes_the_oldest() -> None:
    rows = [prefilling(0), prefilling(1), prefilling(2, prompt_tokens=4), decoding(3)]
    step = plan(rows)
    assert step.chunk is rows[2]
    assert step.passed is rows[0]


def test_the_oldest_prompt_is_passed_once_in_a_row_at_most() -> None:
    rows = [prefilling(0), prefilling(1, prompt_tokens=3), prefilling(2, prompt_tokens=4)]
    rows[0].was_passed = True
    step = plan(rows)
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
    chunk = plan([row], chunk_tokens=99).batch().chunk
    assert chunk is not None
    assert (chunk.tokens, chunk.start, chunk.wants_logits) == ([10, 11, 12, 7, 8], 0, True)
    row.home.tokens += [10, 11]
    assert plan([row], chunk_tokens=2).batch().chunk is not None
    assert row.work(2).tokens == [12, 7]


def test_an_encoders_step_takes_whole_texts_while_they_fit() -> None:
    rows = [prefilling(i, prompt_tokens=length) for i, length in enumerate((5, 9, 3, 2, 1))]
    step = plan_texts(rows[::-1], max_texts=3, max_tokens=12)
    assert step is not None
    # The second does not fit beside the first; it is the first of the next step.
    assert [row.task_id for row in step.rows] == [0, 2, 3]
    assert [len(text.tokens) for text in step.batch().texts] == [5, 3, 2]
    assert [step.length(row) for row in step.rows] == [5, 3, 2]
    following = plan_texts([rows[1], rows[4]], max_texts=3, max_tokens=12)
    assert following is not None
    assert following.rows == (rows[1], rows[4])
    assert plan_texts([], max_texts=3, max_tokens=12) is None

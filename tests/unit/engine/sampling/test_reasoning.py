"""The end of reasoning: when it is forced, what is counted, what a constraint sees of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.requests import ReasoningBudget, SamplingParams
from engine.sampling.chain import Chain
from engine.sampling.reasoning import ReasoningState
from tests.unit.engine.sampling.support import ArrayRow, make_vocab
from tests.unit.engine.sampling.test_constrained import Allowing

OPEN, CLOSE_A, CLOSE_B, WAIT, HALF, REST = 1, 2, 3, 4, 5, 6
SIZE = 300
BUDGET = ReasoningBudget(
    tokens=3,
    start=(OPEN,),
    ends=((CLOSE_A, CLOSE_B), (CLOSE_B,)),
    forced=(WAIT, CLOSE_A, CLOSE_B),
)


def piece(token_id: int) -> bytes:
    return {HALF: "é".encode()[:1], REST: "é".encode()[1:]}.get(token_id, b"x")


def walk(budget: ReasoningBudget, *tokens: int) -> ReasoningState:
    state = ReasoningState(budget, piece)
    for token_id in tokens:
        state.accept(token_id)
    return state


@pytest.mark.parametrize(
    ("tokens", "is_inside", "forced"),
    [
        ((), False, None),
        ((9, 9, 9, 9, 9), False, None),
        ((OPEN,), True, None),
        ((OPEN, 9, 9), True, None),
        ((OPEN, 9, 9, 9), True, WAIT),
        ((OPEN, 9, 9, 9, WAIT), True, CLOSE_A),
        ((OPEN, 9, 9, 9, WAIT, CLOSE_A), True, CLOSE_B),
        ((OPEN, 9, 9, 9, WAIT, CLOSE_A, CLOSE_B), False, None),
        ((OPEN, 9, CLOSE_B), False, None),
        ((OPEN, 9, CLOSE_A, CLOSE_B, 9, 9, 9), False, None),
        # Every reasoning has its own budget.
        ((OPEN, 9, CLOSE_B, OPEN, 9, 9), True, None),
        ((OPEN, 9, CLOSE_B, OPEN, 9, 9, 9), True, WAIT),
        # A character is not cut in two; as in the peer, its last byte alone does not tell its end.
        ((OPEN, 9, 9, HALF), True, None),
        ((OPEN, 9, 9, HALF, REST), True, None),
        ((OPEN, 9, 9, HALF, REST, 9), True, WAIT),
    ],
)
def test_where_a_generation_stands(tokens: tuple[int, ...], is_inside: bool, forced: int | None):
    state = walk(BUDGET, *tokens)
    assert (state.is_inside, state.forced_token) == (is_inside, forced)


def test_no_budget_ends_reasoning_at_once():
    assert walk(replace(BUDGET, tokens=0), OPEN).forced_token == WAIT


def test_the_opening_of_the_turn_counts():
    assert walk(replace(BUDGET, opening=(OPEN, 9, 9)), 9).forced_token == WAIT
    assert not walk(replace(BUDGET, opening=(OPEN, 9, CLOSE_B))).is_inside


def test_the_longest_closing_that_ends_here_is_told():
    state = walk(BUDGET, OPEN)
    assert [state.accept(token) for token in (CLOSE_A, CLOSE_B)] == [(), (CLOSE_A, CLOSE_B)]
    state = walk(BUDGET, OPEN, 9, 9, 9)
    assert [state.accept(token) for token in BUDGET.forced] == [(), (), (CLOSE_A, CLOSE_B)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_thinks_for_three_tokens(temperature: float):
    params = SamplingParams(temperature=temperature, logit_bias=((CLOSE_A, -50.0),))
    chain = Chain(params, vocab=make_vocab(SIZE), prompt=[], seed=1, reasoning=BUDGET)
    # Token 9 is by far the likeliest; the first one opens reasoning.
    logits = np.zeros(SIZE, np.float32)
    logits[OPEN] = 90
    first = chain.sample(ArrayRow(logits))
    logits[OPEN], logits[9] = 0, 90
    rest = [chain.sample(ArrayRow(logits)) for _ in range(8)]
    assert [first, *rest] == [OPEN, 9, 9, 9, WAIT, CLOSE_A, CLOSE_B, 9, 9]


@pytest.mark.parametrize("holds", [True, False])
def test_a_constraint_waits_for_the_end_of_reasoning(holds: bool):
    budget = replace(BUDGET, opening=(OPEN,), holds_constraint=holds)
    constraint = Allowing(9, 8)
    chain = Chain(
        SamplingParams(temperature=0),
        vocab=make_vocab(SIZE),
        prompt=[],
        seed=1,
        constraint=constraint,
        reasoning=budget,
    )
    logits = np.zeros(SIZE, np.float32)
    logits[10], logits[9] = 2, 1
    assert chain.sample(ArrayRow(logits)) == (10 if holds else 9)
    assert constraint.accepted == ([] if holds else [9])


def test_what_closes_reasoning_is_shown_to_the_constraint():
    constraint = Allowing(9)
    chain = Chain(
        SamplingParams(temperature=0),
        vocab=make_vocab(SIZE),
        prompt=[],
        seed=1,
        constraint=constraint,
        reasoning=replace(BUDGET, opening=(OPEN,), holds_constraint=True),
    )
    logits = np.zeros(SIZE, np.float32)
    logits[10] = 1
    for _ in range(6):
        chain.sample(ArrayRow(logits))
    assert constraint.accepted == [CLOSE_A, CLOSE_B]
    assert chain.sample(ArrayRow(logits)) == 9

"""A chain under a constraint: which draw counts, which random numbers are used."""

from __future__ import annotations

import numpy as np
import pytest

from engine.constraint import BoolArray
from engine.errors import GrammarDeadEnd
from engine.requests import Sampler, SamplingParams
from engine.sampling.chain import Chain
from engine.sampling.masked import MaskedRow
from engine.sampling.mt19937 import Mt19937
from tests.fake_logits import FakeRow
from tests.unit.engine.sampling.support import ArrayRow, make_vocab

SIZE = 300
END = 2


class Allowing:
    """Allows the same tokens at every step, and counts how often it is asked for all of them."""

    def __init__(self, *allowed: int, complete: bool = False, active: bool = True) -> None:
        self.allowed = set(allowed)
        self.is_complete = complete
        self.is_active = active
        self.accepted: list[int] = []
        self.num_masks = 0

    def allows(self, token_id: int) -> bool:
        return token_id in self.allowed

    def mask(self) -> BoolArray:
        self.num_masks += 1
        mask = np.zeros(SIZE, np.bool_)
        mask[sorted(self.allowed)] = True
        return mask

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def chain(constraint: Allowing, params: SamplingParams, *, ignore_eos: bool = False) -> Chain:
    return Chain(
        params,
        vocab=make_vocab(SIZE, eog=[END]),
        prompt=[],
        seed=7,
        ignore_eos=ignore_eos,
        constraint=constraint,
    )


def row(seed: int = 0) -> ArrayRow:
    return ArrayRow(np.random.default_rng(seed).normal(size=SIZE).astype(np.float32))


GREEDY = SamplingParams(temperature=0)


def test_the_best_token_is_taken_where_it_may_follow():
    logits = row()
    best = int(logits.full().argmax())
    constraint = Allowing(best)
    assert chain(constraint, GREEDY).sample(logits) == best
    assert (constraint.accepted, constraint.num_masks) == ([best], 0)


def test_a_rejected_draw_is_drawn_again_among_those_that_may_follow():
    logits = row()
    constraint = Allowing(5, 9, 200)
    token_id = chain(constraint, GREEDY).sample(logits)
    assert token_id == max((5, 9, 200), key=lambda i: logits.full()[i])
    assert (constraint.accepted, constraint.num_masks) == ([token_id], 1)


def test_a_constraint_that_waits_lets_everything_pass():
    constraint = Allowing(active=False)
    token_id = chain(constraint, GREEDY).sample(row())
    assert constraint.accepted == [token_id]


def test_a_rejected_draw_uses_up_a_random_number():
    # A plain draw walks all tokens in id order; the second number decides between two of them.
    params = SamplingParams(samplers=())
    logits = ArrayRow(np.zeros(SIZE, np.float32))
    generator = Mt19937(7)
    first = int(generator.next_double() * SIZE)
    assert first not in (10, 290)
    expected = 10 if generator.next_double() <= 0.5 else 290
    constraint = Allowing(10, 290)
    assert chain(constraint, params).sample(logits) == expected


def test_ruled_out_tokens_stay_in_play_for_samplers_that_count():
    params = SamplingParams(samplers=(Sampler.TOP_K,), top_k=3, temperature=1)
    constraint = Allowing(8, 11)
    drawn = {chain(constraint, params).sample(row(seed)) for seed in range(20)}
    assert drawn == {8, 11}


def test_a_complete_text_ends_even_where_the_end_is_forbidden():
    constraint = Allowing(END, complete=True)
    assert chain(constraint, GREEDY, ignore_eos=True).sample(row()) == END


def test_a_text_that_nothing_can_continue_is_an_error():
    params = SamplingParams(temperature=0, logit_bias=((4, -np.inf),))
    with pytest.raises(GrammarDeadEnd):
        chain(Allowing(4), params).sample(row())


def test_probabilities_are_of_the_raw_logits():
    logits = row()
    sampler = chain(Allowing(5), GREEDY)
    sampler.sample(logits)
    sampled, top = sampler.probabilities(1, post_chain=False)
    assert sampled == pytest.approx(float(logits.full()[5]) - logits.log_sum_exp, abs=1e-5)
    assert top[0][0] == int(logits.full().argmax())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.9, 1.0])
def test_a_masked_rows_best_are_those_of_the_whole_row(share: float):
    rng = np.random.default_rng(int(share * 1000))
    for size in (3, 40, 64, 5000):
        logits = rng.integers(-5, 5, size).astype(np.float32)  # with many ties
        mask = rng.random(size) < share
        masked = MaskedRow(FakeRow(logits), mask)
        ids, values = masked.top()
        expected = np.argsort(-masked.full(), kind="stable")[: min(64, size)]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, masked.full()[expected])


def test_a_masked_row_lists_its_best_first():
    logits = row()
    mask = np.zeros(SIZE, np.bool_)
    mask[[3, 70, 150]] = True
    ids, values = MaskedRow(logits, mask).top()
    assert set(ids[:3].tolist()) == {3, 70, 150}
    assert np.all(np.diff(values[:3]) <= 0)
    assert np.all(np.isneginf(values[3:]))

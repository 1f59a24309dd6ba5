from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.edits import LogitBias, Penalties
from tests.unit.engine.sampling.support import candidates

TOKENS = st.lists(st.integers(0, 5), max_size=30)
F = np.float32


def test_bias_is_added_once_per_mention_and_can_forbid() -> None:
    bias = LogitBias([(1, 0.5), (3, -math.inf), (1, 0.25)])
    result = bias.apply(candidates([1.0, 2.0, 3.0, 4.0]))
    assert result.logits.tolist() == [1.0, 2.75, 3.0, -math.inf]
    assert bias.token_ids().tolist() == [1, 3, 1]


def test_bias_leaves_the_row_untouched() -> None:
    base = candidates([1.0, 2.0])
    LogitBias([(0, 5.0)]).apply(base)
    assert base.logits.tolist() == [1.0, 2.0]


@given(
    prompt=TOKENS,
    generated=TOKENS,
    last_n=st.integers(1, 12),
    repeat=st.floats(0.5, 2, width=32),
    frequency=st.floats(-1, 1, width=32),
    presence=st.floats(-1, 1, width=32),
)
def test_penalties(
    prompt: list[int],
    generated: list[int],
    last_n: int,
    repeat: float,
    frequency: float,
    presence: float,
) -> None:
    penalties = Penalties(
        last_n=last_n, repeat=repeat, frequency=frequency, presence=presence, prompt=prompt
    )
    for token_id in generated:
        penalties.accept(token_id)
    counts = Counter((prompt + generated)[-last_n:])
    logits = [1.5, -2.5, 0.0, 3.0, -0.5, 2.0]
    expected: list[float] = []
    for i, x in enumerate(logits):
        if not counts[i]:
            expected.append(x)
            continue
        scaled = F(x) * F(repeat) if x <= 0 else F(x) / F(repeat)
        expected.append(float(scaled - (F(counts[i]) * F(frequency) + F(presence))))
    result = penalties.apply(candidates(logits, is_sorted=True))
    assert result.logits.tolist() == expected
    assert not result.is_sorted
    assert set(penalties.token_ids().tolist()) == set(counts)


def test_penalties_of_a_shuffled_set_find_their_tokens() -> None:
    penalties = Penalties(last_n=4, repeat=1.0, frequency=0.0, presence=1.0, prompt=[0, 2])
    shuffled = candidates([1.0, 2.0, 3.0]).sorted()
    assert penalties.apply(shuffled).logits.tolist() == [2.0, 2.0, 0.0]

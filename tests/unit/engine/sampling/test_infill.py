from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.candidates import Candidates
from engine.sampling.infill import Infill
from tests.unit.engine.sampling.support import from_probs, ids, make_vocab

END = 0
F = np.float32


def _kept(words: list[bytes], probs: list[float]) -> Candidates:
    vocab = make_vocab([b"", *words], eog=[END], end_token=END)
    return Infill(vocab).apply(from_probs(probs))


def _reference(words: list[bytes], probs: list[float]) -> list[int]:
    """The definition, quadratic, on probabilities sorted by falling value."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    p = {i: probs[i] for i in order}
    if 3 * p[END] * len(p) > sum(p.values()) - p[END]:
        return [END]
    dead: set[int] = set()
    pieces = [b"", *words]
    for i in order:
        for j in order:
            if i in dead:
                break
            if i == j or j in dead or not pieces[i] or not pieces[j].startswith(pieces[i]):
                continue
            winner, loser = (j, i) if p[j] > p[i] else (i, j)
            p[winner] += p[loser]
            p[loser] = 0.0
            dead.add(loser)
    kept = [i for i in order if p[i] >= 0.2 or i == END]
    if kept == [END]:
        return [END]
    total = sum(p[i] for i in kept)
    return [i for i in kept if p[i] / total >= 1 / len(kept) or i == END]


@given(
    st.lists(st.text("ab", min_size=1, max_size=3).map(str.encode), min_size=2, max_size=6),
    st.lists(st.integers(1, 1000), min_size=6, max_size=6, unique=True),
    st.floats(1e-6, 0.02),
)
def test_keeps_what_the_definition_keeps(
    words: list[bytes], weights: list[int], end: float
) -> None:
    weights = weights[: len(words)]
    probs = [end, *((1 - end) * w / sum(weights) for w in weights)]
    assert set(ids(_kept(words, probs))) == set(_reference(words, probs))


def test_a_likely_end_is_all_that_is_left() -> None:
    assert ids(_kept([b"a", b"b"], [0.2, 0.5, 0.3])) == [END]


def test_a_prefix_gives_its_weight_to_the_likelier_extension() -> None:
    kept = _kept([b"wor", b"world", b"x"], [1e-6, 0.35, 0.6, 0.05])
    assert sorted(ids(kept)) == [END, 2]


def test_nothing_that_stands_out_ends_the_text() -> None:
    kept = _kept([b"a", b"b", b"c", b"d", b"e", b"f"], [1e-6, *[0.16] * 5, 0.199999])
    assert (ids(kept), kept.logits.tolist()) == ([END], [1.0])


def test_merging_leaves_no_forbidden_token() -> None:
    kept = _kept([b"a", b"ab"], [1e-6, 0.4, 0.6])
    assert not np.isinf(kept.logits).any()
    assert math.isfinite(float(kept.logits.sum()))

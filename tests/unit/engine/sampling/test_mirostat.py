from __future__ import annotations

import math

import numpy as np
import pytest

from engine.sampling.mirostat import MirostatV1, MirostatV2
from engine.sampling.mt19937 import Mt19937
from tests.unit.engine.sampling.support import candidates

SEED, TAU, ETA, VOCAB = 11, 3.0, 0.2, 200


def _probs(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


def _v1_size(probs: list[float], mu: float) -> int:
    above = below = 0.0
    for i in range(min(99, len(probs) - 1)):
        t, b = math.log((i + 2) / (i + 1)), math.log(probs[i] / probs[i + 1])
        above, below = above + t * b, below + t * t
    s = above / below
    k = ((s - 1) * 2**mu / (1 - VOCAB ** (1 - s))) ** (1 / s)
    return max(int(k), 1)


def _v2_size(probs: list[float], mu: float) -> int:
    return max(sum(-math.log2(p) <= mu for p in probs), 1)


@pytest.mark.parametrize("version", [1, 2])
def test_twenty_steps_follow_the_paper(version: int) -> None:
    if version == 1:
        sampler = MirostatV1(vocab_size=VOCAB, tau=TAU, eta=ETA, seed=SEED)
    else:
        sampler = MirostatV2(tau=TAU, eta=ETA, seed=SEED)
    rng, uniforms, mu = np.random.default_rng(version), Mt19937(SEED), 2 * TAU
    for _ in range(20):
        logits = (rng.normal(size=VOCAB) * 2).astype(np.float32).tolist()
        order = sorted(range(VOCAB), key=lambda i: -logits[i])
        probs = _probs([logits[i] for i in order])
        size = _v1_size(probs, mu) if version == 1 else _v2_size(probs, mu)
        kept = _probs([logits[i] for i in order[:size]])
        index = 0
        if len(kept) > 1:
            uniform = uniforms.next_double()
            index = next(i for i in range(size) if sum(kept[: i + 1]) >= uniform - 1e-9)
        pick = sampler.pick(candidates(logits))
        assert len(pick.candidates) == size
        assert pick.token_id == order[index]
        mu -= ETA * (-math.log2(kept[index]) - TAU)


@pytest.mark.parametrize(
    "logits", [[1.0], [0.0, -math.inf, -math.inf], [-math.inf, -math.inf], [5.0] * 8]
)
def test_degenerate_rows_still_give_a_token(logits: list[float]) -> None:
    with np.errstate(all="ignore"):
        for sampler in (
            MirostatV1(vocab_size=len(logits), tau=TAU, eta=ETA, seed=SEED),
            MirostatV2(tau=TAU, eta=ETA, seed=SEED),
        ):
            assert 0 <= sampler.pick(candidates(logits)).token_id < len(logits)

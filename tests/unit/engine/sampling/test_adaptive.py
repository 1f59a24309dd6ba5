from __future__ import annotations

import math

import numpy as np
import pytest

from engine.sampling.adaptive import AdaptiveP
from engine.sampling.mt19937 import Mt19937
from tests.unit.engine.sampling.support import candidates

SEED, TARGET, DECAY = 5, 0.4, 0.8


def _probs(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


def _walk(probs: list[float], uniform: float) -> int:
    return next(i for i in range(len(probs)) if sum(probs[: i + 1]) >= uniform - 1e-7)


def test_thirty_steps_follow_the_definition() -> None:
    sampler = AdaptiveP(target=TARGET, decay=DECAY, seed=SEED)
    rng, uniforms = np.random.default_rng(0), Mt19937(SEED)
    weighted, weight = TARGET / (1 - DECAY), 1 / (1 - DECAY)
    for _ in range(30):
        logits = rng.normal(size=12).astype(np.float32).tolist()
        probs = _probs(logits)
        target = min(max(2 * TARGET - weighted / weight, 0.0), 1.0)
        distances = [abs(p - target) / 0.3 for p in probs]
        shaped = _probs([5 - 10 * d * d / (1 + d) for d in distances])
        pick = sampler.pick(candidates(logits))
        assert pick.token_id == _walk(shaped, uniforms.next_double())
        assert pick.probs.tolist() == pytest.approx(shaped, abs=1e-5)
        sampler.accept(pick.token_id)
        weighted, weight = probs[pick.token_id] + DECAY * weighted, 1 + DECAY * weight


def test_a_negative_target_only_draws() -> None:
    sampler, uniforms = AdaptiveP(target=-1.0, decay=DECAY, seed=SEED), Mt19937(SEED)
    logits = [0.5, 1.5, -1.0]
    for _ in range(20):
        expected = _walk(_probs(logits), uniforms.next_double())
        assert sampler.pick(candidates(logits)).token_id == expected


def test_a_token_that_was_not_picked_changes_nothing() -> None:
    logits = np.random.default_rng(1).normal(size=12).tolist()
    told, untold = (AdaptiveP(target=TARGET, decay=DECAY, seed=SEED) for _ in range(2))
    picked = told.pick(candidates(logits)).token_id
    untold.pick(candidates(logits))
    told.accept(picked + 1)
    assert (
        told.pick(candidates(logits)).probs.tolist()
        == untold.pick(candidates(logits)).probs.tolist()
    )


def test_forbidden_tokens_stay_forbidden() -> None:
    sampler = AdaptiveP(target=0.0, decay=DECAY, seed=SEED)
    for _ in range(20):
        assert sampler.pick(candidates([1.0, -math.inf, 0.0])).token_id != 1

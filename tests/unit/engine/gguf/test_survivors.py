"""Damaged models that load all the same answer, or fail by name, and take nothing with them.

`make sanitize` runs these on kernels with sanitizers, `make survivors` 2,000 of all seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import requires_native
from tests.survivors.damage import make_mutant
from tests.survivors.seeds import write_seeds
from tests.survivors.trial import Trials

pytestmark = requires_native

# Blocks of 256 without experts; and windows, sinks and experts.
SEEDS = ("llama-Q4_K", "gpt-oss")
# Those whose weights are damaged: of the others each is compiled for seconds.
NUMBERS = [number for number in range(45) if number % 3]


def test_the_same_name_gives_the_same_bytes(tmp_path: Path) -> None:
    once, again = write_seeds(tmp_path), write_seeds(tmp_path)
    for name in SEEDS:
        for number in range(6):
            mutant = make_mutant(once[name], number)
            assert mutant == make_mutant(again[name], number)
            assert mutant != once[name].data


def test_survivors_answer_or_fail_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seeds = write_seeds(tmp_path)
    trials = Trials([seeds[name] for name in SEEDS], tmp_path)
    with caplog.at_level("CRITICAL"):  # each answer that is not finite is logged as a fault
        outcomes = [trials.try_one(trials.seeds[number % 2], number) for number in NUMBERS]
    assert {outcome.name for outcome in outcomes if outcome.has_token} == set(SEEDS)
    answers = {answer for outcome in outcomes for answer in outcome.answers}
    assert "what the model made is not finite" in answers, "no number was too large"
    assert any(outcome.refusal.startswith("ModelFileError") for outcome in outcomes)

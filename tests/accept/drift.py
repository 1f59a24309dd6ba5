"""How far the native kernels are from the exact model on a quantised file, by its first steps.

They round activations to 8 bits, as llama.cpp's kernels do, so neither gives the exact model's
tokens. The recording has the exact distribution of each prompt's first token, and how far llama.cpp
was from it; averaged over the file, we must be no further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.gguf.reader import GgufFile
from tests.accept.greedy import ask, serving
from tests.accept.models import Model, Models
from tests.accept.outcome import Failure, Unsupported

_DENSE = frozenset({"F32", "F16", "BF16"})


def is_quantised(model: Model) -> bool:
    """Whether a matrix of the file is of a quantised type."""
    with GgufFile.open(model.path) as file:
        return any(info.ggml_type.name not in _DENSE for info in file.tensors.values())


def check_drift(golden: Mapping[str, Any], models: Models) -> str:
    """Runs the first step of every case; returns our divergence beside llama.cpp's.

    Raises:
        Unsupported: the model is not one that this build runs, or no drift was recorded.
        Failure: we are further from the exact model than llama.cpp is.
    """
    recorded = [
        case["drift"]["first_step_kl"] for case in golden["native_cases"] if "drift" in case
    ]
    if not recorded:
        raise Unsupported("has no recorded drift; its model's divergence is measured on a text")
    found: list[float] = []
    with serving(golden, models) as (loaded, inbox):
        for case in golden["cases"]:
            exact: Sequence[float] = case["first_logprobs"]
            first = ask(loaded, inbox, case["prompt_ids"], 1, len(exact)).logprobs[0]
            found.append(kl(exact, [first[token] for token in range(len(exact))]))
    return judge_drift(found, recorded)


def judge_drift(found: Sequence[float], recorded: Sequence[float]) -> str:
    """Holds the mean of our divergences against llama.cpp's; returns both.

    Raises:
        Failure: ours is larger, or no number.
    """
    ours, theirs = float(np.mean(found)), float(np.mean(recorded))
    said = f"mean KL of the first step {ours:.2e} (llama.cpp {theirs:.2e})"
    # Written so that a NaN fails.
    if ours <= theirs:
        return said
    raise Failure(said)


def kl(exact: Sequence[float], found: Sequence[float]) -> float:
    """KL divergence in nats of `found` from `exact`, log-probabilities of every token."""
    expected, got = np.array(exact, np.float64), np.array(found, np.float64)
    return float(np.sum(np.exp(expected) * (expected - got)))

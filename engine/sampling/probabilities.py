"""Log-probabilities of a step: of the raw logits, or of what a chain left."""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np

from engine.sampling.candidates import largest
from engine.sampling.float32 import MAX
from engine.sampling.stage import Pick
from engine.step import FloatArray, IntArray, RowLogits

# What llama.cpp prints as the logarithm of 0.
LOG_OF_ZERO = -MAX
_SMALLEST_FLOAT = float(np.finfo(np.float32).smallest_subnormal)
# Half of the smallest float32 rounds to 0.
_LOG_OF_SMALLEST = math.log(_SMALLEST_FLOAT) - math.log(2)

LogProbs = tuple[float, list[tuple[int, float]]]


def raw_probabilities(row: RowLogits, token_id: int, n: int) -> LogProbs:
    """Returns log-probabilities before any bias or sampler.

    Args:
        row: The row that was sampled from.
        token_id: The sampled token.
        n: How many of the best to list; no more than there are.

    Returns:
        That of the sampled token, and (id, log-probability) of the n best, falling, ties by id.

    Source: llama.cpp `get_token_probabilities`.
    """
    ids, logits = _best(row, n)
    total = row.log_sum_exp
    sampled = row.at(np.array([token_id], np.int32))[0]
    top = [
        (best, _floored(logit - total))
        for best, logit in zip(ids.tolist(), logits.tolist(), strict=True)
    ]
    return _floored(float(sampled) - total), top


def post_chain_probabilities(pick: Pick, n: int) -> LogProbs:
    """Returns log-probabilities of the distribution that the token was drawn from.

    The list is in the chain's order where that is sorted, else by falling probability, and ends
    before the first probability of 0.

    Source: llama.cpp `common_sampler_get_candidates`, `populate_token_probs`.
    """
    ids, probs = pick.candidates.ids, pick.probs
    if not pick.candidates.is_sorted:
        order = largest(probs, min(n, len(probs)))
        ids, probs = ids[order], probs[order]
    pairs = zip(ids[:n].tolist(), probs[:n].tolist(), strict=True)
    top = [(token_id, math.log(p)) for token_id, p in takewhile(lambda pair: pair[1] > 0, pairs)]
    sampled = float(pick.probs[pick.selected])
    return math.log(sampled) if sampled > 0 else LOG_OF_ZERO, top


def _best(row: RowLogits, n: int) -> tuple[IntArray, FloatArray]:
    ids, logits = row.top()
    if n > len(ids) and len(ids) < row.vocab_size:
        logits = row.full()
        order = largest(logits, min(n, len(logits)))
        ids, logits = order.astype(np.int32), logits[order]
    return ids[:n], logits[:n]


def _floored(logprob: float) -> float:
    return logprob if logprob >= _LOG_OF_SMALLEST else LOG_OF_ZERO

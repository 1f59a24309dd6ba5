"""DRY ("don't repeat yourself"): penalises tokens that would extend a repeated sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampling.breakers import MAX_TAIL_TOKENS, Tails
from engine.sampling.candidates import Candidates
from engine.sampling.float32 import log_scalar
from engine.sampling.stage import Edit
from engine.step import IntArray

_LOG_FLOAT_MAX = np.float32(88.7228391)
# Bases this close to 1 never overflow, and their logarithm would divide by nothing.
_SMALLEST_GROWING_BASE = np.float32(1.000001)


def suffix_runs(tokens: Sequence[int]) -> list[int]:
    """Returns for each position how many tokens up to it equal the end of the sequence.

    The last entry is 0. Linear time: the Z-function of the reversed sequence.
    """
    size = len(tokens)
    reverse = list(tokens)[::-1]
    z = [0] * size
    left = right = 0
    for i in range(1, size):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < size and reverse[length] == reverse[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z[::-1]


class _Window:
    """The last tokens and, for each, how long a run that ends there repeats the window's end."""

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        tokens = tokens[-size:]
        self._size = size
        self.tokens = np.array(tokens, dtype=np.int32)
        self._runs = np.array(suffix_runs(tokens), dtype=np.int32)

    def append(self, token_id: int) -> None:
        # A run that ended before a place goes on there if its token is the new one.
        longer = np.where(self.tokens[1:] == token_id, self._runs[:-1] + 1, 0)
        first = (self.tokens[:1] == token_id).astype(np.int32)
        last = np.zeros(1, np.int32)
        self._runs = np.concatenate([first, longer, last])[-self._size :].astype(np.int32)
        self.tokens = np.append(self.tokens, np.int32(token_id))[-self._size :]

    def runs(self) -> IntArray:
        """The runs that lie inside the window."""
        room = np.arange(1, len(self._runs) + 1, dtype=np.int32)
        return np.minimum(self._runs, room)


class Dry(Edit):
    """Subtracts `multiplier * base ** (run - allowed_length)` from what would go on a run.

    `last_n` > 0 is the window in tokens, the prompt included. A breaker limits how far back a run
    reaches, and a token that is one by itself is never penalised.

    Source: llama.cpp `llama_sampler_dry_apply`.
    """

    def __init__(
        self,
        *,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Tails,
        prompt: Sequence[int],
    ) -> None:
        self._multiplier = np.float32(multiplier)
        self._base = np.float32(base)
        self._allowed_length = allowed_length
        self._breakers = breakers
        self._window = _Window(prompt, last_n)
        self._max_exponent = 0
        if self._base > _SMALLEST_GROWING_BASE:
            self._max_exponent = int(_LOG_FLOAT_MAX / log_scalar(self._base))
        self._refresh()

    def accept(self, token_id: int) -> None:
        """Moves the window on."""
        self._window.append(token_id)
        self._refresh()

    def token_ids(self) -> IntArray:
        """The tokens that would go on a run."""
        return self._ids

    def apply(self, candidates: Candidates) -> Candidates:
        """Penalises them; a window too short or just broken leaves the set as it is."""
        if not self._is_active:
            return candidates
        at, found = candidates.find(self._ids)
        logits = candidates.logits.copy()
        logits[at] -= self._penalties[found]
        return candidates.with_logits(logits, is_sorted=False)

    def _refresh(self) -> None:
        longest = self._longest_runs()
        self._is_active = longest is not None
        ids = [i for i in longest or {} if () not in self._breakers(i)]
        self._ids = np.array(ids, dtype=np.int32)
        exponents = np.array([(longest or {})[i] for i in ids]) - self._allowed_length
        if self._max_exponent:
            exponents = np.minimum(exponents, self._max_exponent)
        powers = np.float64(self._base) ** exponents
        self._penalties = (np.float64(self._multiplier) * powers).astype(np.float32)

    def _longest_runs(self) -> dict[int, int] | None:
        """Maps each token that would go on a run to its longest; None: nothing is looked at."""
        tokens = self._window.tokens
        if len(tokens) <= self._allowed_length:
            return None
        runs = self._window.runs()[:-1]
        limit = self._run_limit(max(int(runs.max(initial=0)), self._allowed_length))
        if limit < self._allowed_length:
            return None
        runs = np.minimum(runs, limit)
        at = np.flatnonzero(runs >= self._allowed_length)
        # Rising runs, so that a token's longest is the one that stays in the dict.
        at = at[np.argsort(runs[at])]
        return dict(zip(tokens[at + 1].tolist(), runs[at].tolist(), strict=True))

    def _run_limit(self, enough: int) -> int:
        """Returns how long a run may be before the nearest breaker; not looked up past `enough`."""
        tokens = self._window.tokens
        size = len(tokens)
        for back in range(min(size, enough + MAX_TAIL_TOKENS + 1)):
            at = size - 1 - back
            tails = self._breakers(int(tokens[at]))
            if not tails:
                continue
            following = tuple(tokens[at + 1 : at + 1 + MAX_TAIL_TOKENS].tolist())
            matches = [len(tail) for tail in tails if following[: len(tail)] == tail]
            if matches:
                return back - max(matches)
        return size

"""llama.cpp's sampler chain: from one row of logits to one token, exactly and reproducibly.

A chain belongs to one request; it owns the request's generators and penalty history. It knows
nothing of text, batches or devices: a row hides whether its logits are here or on a device.

Example:
    >>> chain = Chain(SamplingParams(temperature=0.8), vocab=vocab, prompt=[1, 403], seed=42)
    >>> token_id = chain.sample(row)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.constraint import ConstraintState
from engine.errors import GrammarDeadEnd
from engine.requests import ReasoningBudget, SamplingParams
from engine.sampling.adaptive import AdaptiveP
from engine.sampling.builder import Builder
from engine.sampling.candidates import Candidates, gather, whole
from engine.sampling.checks import check_params
from engine.sampling.dist import Dist
from engine.sampling.dry import Dry
from engine.sampling.edits import Penalties
from engine.sampling.greedy import Greedy
from engine.sampling.masked import MaskedRow
from engine.sampling.probabilities import (
    LogProbs,
    post_chain_probabilities,
    raw_probabilities,
)
from engine.sampling.reasoning import ReasoningState
from engine.sampling.stage import Edit, Listener, Pick, Stage
from engine.sampling.temperature import Temperature
from engine.sampling.truncation import MinP, TopK
from engine.sampling.vocab import SamplerVocab
from engine.step import IntArray, RowLogits


class Chain:
    """Samples the tokens of one request."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab: SamplerVocab,
        prompt: Sequence[int],
        seed: int,
        ignore_eos: bool = False,
        constraint: ConstraintState | None = None,
        reasoning: ReasoningBudget | None = None,
    ) -> None:
        """Builds the chain.

        Args:
            params: The parameters; their `seed` is not read.
            vocab: The model's tokens.
            prompt: What penalties and DRY remember from the start, the whole prompt.
            seed: 0 .. 2**32 - 1; every sampler that draws has its own generator with this seed.
            ignore_eos: Forbids every token that ends a generation, except where nothing else may
                follow.
            constraint: Which tokens may follow; the chain moves it on.
            reasoning: How long the model may think.

        Raises:
            InvalidField: A parameter that no chain can be built from.
            TokenNotInVocab: A biased token does not exist.
            NotSupported: The infill sampler on a vocabulary without an end token.
        """
        check_params(params, vocab_size=vocab.vocab_size)
        with np.errstate(all="ignore"):
            builder = Builder(params, vocab=vocab, prompt=prompt, seed=seed)
            self._stages = builder.stages(ignore_eos=ignore_eos)
            self._picker = builder.picker()
        self._edits = [stage for stage in self._stages if isinstance(stage, Edit)]
        self._listeners: list[Listener] = [
            part
            for part in (*self._stages, self._picker)
            if isinstance(part, Penalties | Dry | AdaptiveP)
        ]
        self._starts_partial = _starts_partial(self._stages)
        self._greedy = Greedy.of(self._stages) if isinstance(self._picker, Dist) else None
        self._constraint = constraint
        self._end_tokens = vocab.eog_tokens
        self._piece = vocab.word
        self._reasoning = ReasoningState(reasoning, vocab.piece) if reasoning else None
        self._holds_constraint = reasoning is not None and reasoning.holds_constraint
        self._last: tuple[RowLogits, Pick] | None = None

    def sample(self, row: RowLogits) -> int:
        """Draws the next token and remembers it.

        Args:
            row: Finite logits; the caller has checked `row.is_finite`.

        Raises:
            GrammarDeadEnd: No token can continue what the constraint allows.
            EngineError: The constraint's state fails on the token.
        """
        seen = self._seen(row)
        short = self._greedy.pick(seen) if self._greedy else None
        if short is not None and self._constraint is None and self._reasoning is None:
            self._last = row, short
            return short.token_id
        # Forbidding every token, or a temperature near 0, leaves infinities and NaN that the
        # samplers treat as C does; they are no reason for a warning.
        with np.errstate(all="ignore"):
            pick = short or self._draw(seen)
            if self._constraint is not None and not self._is_held:
                pick = self._constrained(self._constraint, seen, pick)
            self._move_on(pick.token_id)
            for listener in self._listeners:
                listener.accept(pick.token_id)
        self._last = row, pick
        return pick.token_id

    def probabilities(self, n: int, *, post_chain: bool) -> LogProbs:
        """Returns the log-probabilities of the last sample.

        Args:
            n: How many candidates to list.
            post_chain: Of what the chain left (zeros absent) instead of the raw logits.

        Returns:
            The sampled token's, and (id, log-probability) of up to n candidates, best first.

        Raises:
            RuntimeError: Nothing was sampled yet.
        """
        if self._last is None:
            raise RuntimeError("no token was sampled yet")
        row, pick = self._last
        if post_chain:
            return post_chain_probabilities(pick, n)
        return raw_probabilities(row, pick.token_id, n)

    def _seen(self, row: RowLogits) -> RowLogits:
        """The row as samplers see it: where reasoning must end, only what ends it."""
        forced = self._reasoning.forced_token if self._reasoning else None
        return row if forced is None else MaskedRow.of_one(row, forced)

    @property
    def _is_held(self) -> bool:
        """Whether the constraint waits for the end of reasoning."""
        return self._holds_constraint and self._reasoning is not None and self._reasoning.is_inside

    def _move_on(self, token_id: int) -> None:
        is_held = self._is_held
        closed = self._reasoning.accept(token_id) if self._reasoning else ()
        if self._constraint is None:
            return
        # What closed reasoning may be what the constraint waits for.
        for accepted in closed if is_held else (token_id,):
            self._constraint.accept(accepted)

    def _constrained(self, constraint: ConstraintState, row: RowLogits, pick: Pick) -> Pick:
        """Returns the pick if it may follow, else one that is drawn again among those that may.

        Source: llama.cpp `common_sampler_sample`.
        """
        if not constraint.is_active or constraint.allows(pick.token_id):
            return pick
        again = self._draw(MaskedRow(row, constraint.mask()))
        if constraint.allows(again.token_id):
            return again
        # Every token that may follow is forbidden by a bias, or the vocabulary has none. A complete
        # text ends, even where the end is forbidden.
        if constraint.is_complete and self._end_tokens:
            end = np.array([min(self._end_tokens)], np.int32)
            return Pick(Candidates(end, row.at(end)), np.ones(1, np.float32), 0)
        piece = self._piece(pick.token_id).decode("utf-8", "replace")
        raise GrammarDeadEnd(piece, pick.token_id)

    def _draw(self, row: RowLogits) -> Pick:
        candidates = gather(row, self._edited_ids()) if self._starts_partial else whole(row)
        for done, stage in enumerate(self._stages):
            if candidates.is_partial and not stage.admits(candidates):
                candidates = self._replayed(row, done)
            candidates = stage.apply(candidates)
        if candidates.is_partial and not self._picker.admits(candidates):
            candidates = self._replayed(row, len(self._stages))
        return self._picker.pick(candidates)

    def _replayed(self, row: RowLogits, done: int) -> Candidates:
        """Runs the first stages again on the whole row; those that admitted a part keep no state."""
        candidates = whole(row)
        for stage in self._stages[:done]:
            candidates = stage.apply(candidates)
        return candidates

    def _edited_ids(self) -> IntArray:
        if not self._edits:
            return np.empty(0, np.int32)
        return np.concatenate([edit.token_ids() for edit in self._edits])


def _starts_partial(stages: Sequence[Stage]) -> bool:
    """Says whether the first stage that needs more than a few logits may do with the best ones."""
    for stage in stages:
        if isinstance(stage, TopK | MinP):
            return True
        if isinstance(stage, Temperature) and stage.temperature <= 0:
            return True
        if not isinstance(stage, Edit | Temperature):
            return False
    return False

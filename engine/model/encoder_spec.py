"""What encoders have that decoders have not, and heads that score a text, as plain data.

Part of `engine.model.spec.ModelSpec`; touches no file and no array.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class EncoderSpec:
    """A model that reads whole texts, every token of which sees all others, and predicts none.

    What goes into the first block is the layer norm `token_embd_norm` of a token's vector plus, of
    a model with `num_token_types`, the first of `token_types` and, with `has_positions`, that of
    its position in `position_embd`.

    Source: Devlin et al. 2019 (BERT); llama.cpp's graph of the same name, which knows no second
    segment.
    """

    num_token_types: int
    has_positions: bool = False


class ScoredState(Enum):
    """Which state of a text is scored: the first or last token's, or the mean of all."""

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True)
class ScoringSpec:
    """A head that scores one state of a text.

    With `has_dense` that is `tanh(cls @ state)` first; `num_outputs` > 0 says how many scores
    `cls.output` makes of it (0: there is no such matrix, and the components are the scores).
    `biases` names those of the two that have one. `is_softmax`: scores are shares.

    Source: llama.cpp `llm_graph_context::build_pooling`.
    """

    state: ScoredState
    has_dense: bool
    num_outputs: int
    biases: frozenset[str] = frozenset()
    is_softmax: bool = False

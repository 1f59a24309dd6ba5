"""What restricts the tokens of a generation, as sampling and scheduling see it.

Knows no grammar, tokenizer or library: `engine.text.grammar` makes these, `engine.sampling` asks
them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


class ConstraintState(Protocol):
    """Where one generation stands in its language. Owned by one chain, never shared."""

    @property
    def is_active(self) -> bool:
        """False while any token may follow: a lazy constraint that waits for its trigger."""
        ...

    @property
    def is_complete(self) -> bool:
        """True where the generation may end here."""
        ...

    def allows(self, token_id: int) -> bool:
        """Says whether a token may follow."""
        ...

    def mask(self) -> BoolArray:
        """Which tokens may follow, one entry per token of the vocabulary; read-only."""
        ...

    def accept(self, token_id: int) -> None:
        """Moves on by a token that was sampled.

        Raises:
            EngineError: The token does not fit, which a lazy constraint finds when it is triggered
                in the middle of a token; or the state has become too large to go on.
        """
        ...


class Constraint(Protocol):
    """A compiled constraint, immutable: any number of generations may begin from it."""

    @property
    def grammar(self) -> str:
        """The grammar's text."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether it waits for a trigger."""
        ...

    def begin(self) -> ConstraintState:
        """Returns the state before the first token."""
        ...

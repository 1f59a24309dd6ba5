"""The head that scores a text, on the host: it sees one state per text. Pure numpy, in f32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.gguf.arena import read_arrays
from engine.gguf.reader import GgufFile
from engine.model.encoder_spec import ScoredState, ScoringSpec
from engine.model.spec import ModelSpec
from engine.model.tensors import scoring_arrays

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ScoringHead:
    """What `ScoringSpec` describes, with its weights by their names in the file."""

    spec: ScoringSpec
    arrays: Mapping[str, FloatArray]

    @property
    def state(self) -> ScoredState:
        """The state that is scored."""
        return self.spec.state

    def scores(self, state: FloatArray) -> FloatArray:
        """Returns the scores of a text's state, f32 [width]; the first is its relevance."""
        if self.spec.has_dense:
            state = np.tanh(self._product("cls", state))
        if self.spec.num_outputs:
            state = self._product("cls.output", state)
        if self.spec.is_softmax:
            shares = np.exp(state - state.max())
            state = shares / shares.sum()
        return state

    def _product(self, name: str, state: FloatArray) -> FloatArray:
        product = self.arrays[f"{name}.weight"] @ state
        return product + self.arrays[f"{name}.bias"] if name in self.spec.biases else product


def read_head(spec: ModelSpec, file: GgufFile) -> ScoringHead | None:
    """Reads a model's head; None where it has none. Its shapes were checked with all others.

    Raises:
        ModelFileError: A value is not finite.
        UnsupportedModel: A tensor has a type that is not a float's.
    """
    if spec.scoring is None:
        return None
    return ScoringHead(spec.scoring, read_arrays(file, scoring_arrays(spec)))

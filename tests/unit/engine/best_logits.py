"""The candidates of a step, by definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.pool_programs import NUM_CANDIDATES


def best_by_definition(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Falling logits, equal ones by rising id."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :NUM_CANDIDATES]

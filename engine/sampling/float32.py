"""Single precision as C computes it: libm's rounding and left-to-right sums.

numpy's own float32 `exp` and `log` are a few units in the last place off and its sums are
pairwise; either is enough to move a truncation boundary and with it a sampled token. Computing in
double and rounding once gives what a C library's `expf`, `logf` and `powf` give (glibc's differ
from it once in some hundred values, by the last bit).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.step import FloatArray

MAX = float(np.finfo(np.float32).max)
NEG_INF = np.float32(-np.inf)


def expf(x: FloatArray) -> FloatArray:
    """Returns e**x, rounded once to float32."""
    return np.exp(x, dtype=np.float64).astype(np.float32)


def logf(x: FloatArray) -> FloatArray:
    """Returns the natural logarithm, rounded once to float32 (-inf for 0)."""
    return np.log(x, dtype=np.float64).astype(np.float32)


def log_scalar(x: np.float32) -> np.float32:
    """`logf` of one positive number."""
    return np.float32(math.log(float(x)))


def running_sum(x: FloatArray) -> FloatArray:
    """Returns the partial sums, each rounded to float32, in order."""
    return np.add.accumulate(x, dtype=np.float32)


def sum_in_order(x: FloatArray) -> np.float32:
    """Returns the sum that a C loop over floats computes; 0 of nothing."""
    return running_sum(x)[-1] if len(x) else np.float32(0)


def running_sum_double(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Returns the partial sums in double, in order."""
    return np.add.accumulate(x, dtype=np.float64)

"""Tensor bytes to float32, exactly as the `gguf` package computes it.

That package is the reference implementation; this module only bounds its memory and types its
errors. It knows no files and no layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from engine.errors import NotSupported

FloatArray = npt.NDArray[np.float32]

PIECE_ELEMENTS = 1 << 18  # Reference dequantisers take some 20 bytes per element: 5 MB a piece.

_dequantize = cast(
    Callable[[npt.NDArray[Any], GGMLQuantizationType], FloatArray], quants.dequantize
)


def dequantise(
    ggml_type: GGMLQuantizationType, raw: npt.NDArray[np.uint8], shape: tuple[int, ...]
) -> FloatArray:
    """Converts a tensor to float32.

    Args:
        ggml_type: Its type.
        raw: Its bytes, 1-D uint8.
        shape: Its shape, outermost first; the last dimension holds whole blocks.

    Returns:
        A new array of `shape`.

    Raises:
        NotSupported: A type without a dequantiser (integers, float64, activation blocks).
        ValueError: `raw` does not hold `shape`.
    """
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    num_blocks = prod(shape) // block_elements
    if raw.size != num_blocks * block_bytes or shape[-1] % block_elements:
        raise ValueError(f"{raw.size} bytes are not a {ggml_type.name} tensor of shape {shape}")
    out = np.empty(prod(shape), np.float32)
    step = max(1, PIECE_ELEMENTS // block_elements)
    # A damaged scale may be infinite or NaN: it must come out as it is, not as a warning.
    with np.errstate(all="ignore"):
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            # One long row per piece: rows mean nothing to blocks, and the package loops over them.
            piece = raw[first * block_bytes : last * block_bytes].reshape(1, -1)
            try:
                values = _dequantize(piece, ggml_type)
            except NotImplementedError as error:
                raise NotSupported(feature=f"tensors of type {ggml_type.name}") from error
            out[first * block_elements : last * block_elements] = values.reshape(-1)
    return out.reshape(shape)

"""Damaged models: as the mutants of `tests.unit.engine.gguf`, and with damage to the weights.

A mutant is named by its seed and a number, and the same name always gives the same bytes.
"""

from __future__ import annotations

import struct

import numpy as np

from tests.survivors.seeds import Seed
from tests.unit.engine.gguf.mutants import mutate

_HALVES = (0x7BFF, 0xFBFF, 0x7C00, 0x7E00, 0x0001, 0x8001, 0x8000, 0x0400)
_FLOATS = tuple(
    struct.pack("<f", value)
    for value in (3e38, -3e38, 1e-45, -0.0, float("inf"), float("nan"), 1e30, -1e-30)
)


def make_mutant(seed: Seed, number: int) -> bytes:
    """The bytes of one; in two of three the weights are damaged, else the head."""
    rng = np.random.default_rng([number, *seed.name.encode()])
    if number % 3 == 0:
        return mutate(rng, seed.data, list(seed.fields))
    data = bytearray(seed.data)
    for _ in range(int(rng.choice([1, 2, 4, 16]))):
        first, last = seed.tensors[rng.integers(len(seed.tensors))]
        at = int(rng.integers(first, last))
        piece = _piece(rng)[: last - at]
        data[at : at + len(piece)] = piece
    return bytes(data)


def _piece(rng: np.random.Generator) -> bytes:
    """What is put over a place in the weights: numbers at their edges, noise, or one byte's run."""
    match int(rng.integers(5)):
        case 0:
            return struct.pack("<H", _HALVES[rng.integers(len(_HALVES))])
        case 1:
            return _FLOATS[rng.integers(len(_FLOATS))]
        case 2:
            return rng.bytes(int(rng.integers(1, 8)))
        case 3:
            return rng.bytes(int(rng.integers(1, 512)))
        case _:
            run = int(rng.choice([0x00, 0xFF, 0x7F, 0x80, 0x77]))
            return bytes([run]) * int(rng.integers(1, 4096))

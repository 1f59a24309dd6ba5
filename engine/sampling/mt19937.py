"""The Mersenne Twister of C++ and the two ways libstdc++ draws a real number from it.

Every sampler that draws owns one, so this module knows nothing of logits.

Example:
    >>> Mt19937(5489).next_u32()
    3499211612
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SIZE = 624
_SHIFT = 397
_U32 = 0xFFFFFFFF
_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)
_MATRIX = np.uint32(0x9908B0DF)
_LARGEST_DOUBLE_BELOW_1 = 1.0 - 2.0**-53
_LARGEST_FLOAT_BELOW_1 = 1.0 - 2.0**-24

_Words = npt.NDArray[np.uint32]


def _seeded(seed: int) -> _Words:
    words = [seed]
    for i in range(1, _SIZE):
        seed = (1812433253 * (seed ^ (seed >> 30)) + i) & _U32
        words.append(seed)
    return np.array(words, dtype=np.uint32)


def _mixed(high: _Words, low: _Words) -> _Words:
    y = (high & _UPPER) | (low & _LOWER)
    return (y >> np.uint32(1)) ^ ((y & np.uint32(1)) * _MATRIX)


def _next_block(old: _Words) -> _Words:
    """Returns the next 624 words of state.

    Word i needs the new word i - 227 once i >= 227, so the block is three slices and a last word.
    """
    step = _SIZE - _SHIFT
    mixed = _mixed(old[:-1], old[1:])
    new = np.empty_like(old)
    new[:step] = old[_SHIFT:] ^ mixed[:step]
    new[step : 2 * step] = new[:step] ^ mixed[step : 2 * step]
    new[2 * step : -1] = new[step : _SHIFT - 1] ^ mixed[2 * step :]
    new[-1:] = new[_SHIFT - 1 : _SHIFT] ^ _mixed(old[-1:], new[:1])
    return new


def _tempered(words: _Words) -> _Words:
    y = words ^ (words >> np.uint32(11))
    y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    return y ^ (y >> np.uint32(18))


class Mt19937:
    """`std::mt19937(seed)`.

    Source: M. Matsumoto and T. Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998); the draws are
    `std::generate_canonical` of libstdc++ 12, which llama.cpp's released builds link.
    """

    def __init__(self, seed: int) -> None:
        """Seeds the generator.

        Args:
            seed: 0 .. 2**32 - 1.

        Raises:
            ValueError: The seed is outside that range.
        """
        if not 0 <= seed <= _U32:
            raise ValueError(f"seed {seed} is not in 0 .. {_U32}")
        self._words = _seeded(seed)
        self._outputs: list[int] = []
        self._used = 0

    def next_u32(self) -> int:
        """Returns the next 32 raw bits."""
        if self._used == len(self._outputs):
            self._words = _next_block(self._words)
            self._outputs = _tempered(self._words).tolist()
            self._used = 0
        value = self._outputs[self._used]
        self._used += 1
        return value

    def next_double(self) -> float:
        """Draws a double from [0, 1): two outputs, the first is the low word."""
        low = self.next_u32()
        high = self.next_u32()
        return min((low + high * 2.0**32) / 2.0**64, _LARGEST_DOUBLE_BELOW_1)

    def next_float(self) -> float:
        """Draws a float32 value from [0, 1): one output."""
        return min(float(np.float32(self.next_u32())) / 2.0**32, _LARGEST_FLOAT_BELOW_1)

"""What the model that is none answers: logits from a hash of all that a sequence holds.

Tokens are written into pages, windows and states so that the content of each can be read again.
Knows no runner.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.step import (
    FloatArray,
    IntArray,
    PageContent,
    StateContent,
)
from engine.types import (
    PoolKind,
)
from tests.fake_text import FakeTokenizer

UNWRITTEN = -1
STATE_TOKENS = 4096  # what a state can remember
HALF_BITS = 16  # of a token, in each of two rows of a state
# Tokens are written with a number of the adapters that they were evaluated under.
_UNDER = 1 << 10
MOVED = 128  # above every token of the alphabet


@dataclass(frozen=True)
class FakeRow:
    """Logits in an array."""

    logits: FloatArray

    @property
    def vocab_size(self) -> int:
        return len(self.logits)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.logits).all())

    @property
    def log_sum_exp(self) -> float:
        peak = float(self.logits.max())
        return peak + math.log(float(np.exp(self.logits.astype(np.float64) - peak).sum()))

    def top(self) -> tuple[IntArray, FloatArray]:
        order = np.argsort(-self.logits, kind="stable").astype(np.int32)
        return order, self.logits[order]

    def at(self, token_ids: IntArray) -> FloatArray:
        return self.logits[token_ids]

    def full(self) -> FloatArray:
        return self.logits


def hashed_logits(history: Sequence[int], vocab_size: int) -> FloatArray:
    """The fake model: logits in [0, 8) that depend on every token of the history, in order."""
    data = np.asarray(history, dtype=np.int32).tobytes()
    noise = np.frombuffer(hashlib.shake_128(data).digest(2 * vocab_size), dtype=np.uint16)
    return noise.astype(np.float32) / np.float32(8192)


def set_number(members: Iterable[tuple[bytes, float]]) -> int:
    """A number of a set of adapters, by content and scale; 0 for none."""
    named = sorted((digest, np.float32(scale).tobytes()) for digest, scale in members)
    if not named:
        return 0
    data = b"".join(digest + scale for digest, scale in named)
    return 1 + int.from_bytes(hashlib.sha256(data).digest()[:2], "little")


def under(tokens: Sequence[int], number: int, start: int = 0) -> list[int]:
    """Tokens as the fake model's history has them, from `start` on under a set of adapters."""
    return [token + _UNDER * (number if i >= start else 0) for i, token in enumerate(tokens)]


def model_logits(history: Sequence[int], vocab_size: int, window: int | None = None) -> FloatArray:
    """What `FakeRunner` answers to a sequence evaluated alone; with a window, it looks there too."""
    recent = () if window is None else history[-window:]
    return hashed_logits((*history, *recent), vocab_size)


def scripted(answer: Sequence[int], prompt_tokens: int) -> Callable[[Sequence[int]], int]:
    """A model that answers every prompt of this length with `answer`, then ends."""

    def next_token(history: Sequence[int]) -> int:
        done = len(history) - prompt_tokens
        return answer[done] if done < len(answer) else FakeTokenizer.eos_token

    return next_token


# As `fake_shape` has them: layers by pool, and (heads, dim) of a token's keys and of its values.
LAYERS = {PoolKind.KV: 2, PoolKind.SWA: 1}
TOKEN_SHAPE = (2, 8)


def pattern(tokens: IntArray, num_layers: int) -> PageContent:
    """What the fake device holds for tokens: another number at every layer and head, exact in f32.

    So content of another layer, head, token or of the other array is never taken for the right one.
    Components take turns with the low byte of the token and with what is above it.
    """
    heads, dim = TOKEN_SHAPE
    places = np.arange(num_layers * heads).reshape(num_layers, 1, heads, 1)
    parts = np.stack([tokens % 256, tokens // 256] * (dim // 2), axis=-1)
    keys = parts[None, :, None, :] * 16 + places * 4
    return PageContent(keys.astype(np.float32), (-4 - keys).astype(np.float32))


def tokens_of(content: PageContent) -> IntArray:
    """The tokens that a pattern stands for, which must be whole; zeros stand for none."""
    low, high = (content.keys[0, :, 0, :2] // 16).astype(np.int32).T
    tokens = high * 256 + low
    expected = pattern(tokens, content.keys.shape[0])
    is_empty = ~(content.keys.any((0, 2, 3)) | content.values.any((0, 2, 3)))
    is_key = (content.keys == expected.keys).all((0, 2, 3))
    assert (is_empty | is_key).all(), "keys of no token"
    is_value = (content.values == expected.values).all((0, 2, 3))
    assert (is_empty | is_value).all(), "values of no token"
    return np.where(is_empty, UNWRITTEN, tokens)


def history_of(content: StateContent) -> list[int]:
    """The tokens that a state of the fake device has seen."""
    high, low = content.conv[0].astype(int)
    tokens: list[int] = ((high << HALF_BITS) | low).tolist()
    return [token for token in tokens if token != UNWRITTEN]


def letters_of(history: Sequence[int]) -> list[int]:
    """The tokens of a history, whatever adapters they were read under and wherever they stood."""
    return [token % MOVED for token in history]


def moved(token: int) -> int:
    """What a token is on the fake device once it was moved: another one, as its past is another."""
    return token | MOVED

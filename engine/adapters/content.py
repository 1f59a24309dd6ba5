"""What an adapter is once its file was read: low-rank pairs by weight, and a few facts.

The values keep the precision of their file (f32, f16 or bf16), so that nothing is lost and nothing
grows. Knows no file format and no model.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

EMBEDDING = "token_embd.weight"
NUMBERS = ("f32", "f16", "bf16")
_STORED = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}

Values = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Pair:
    """The two factors of one weight's change, `factor * up.T @ down`.

    `down` is [rank, cols] and `up` [rank, rows] of the weight, of a stack of experts [experts, rank,
    cols] and [experts, rank, rows]; of the token embedding, `down` is [vocabulary, rank], because a
    token picks its row of it. Both are C-ordered arrays of `number`: float32, float16, or the bits
    of bfloat16 as uint16. `factor` is alpha / rank, 1 without alpha.
    """

    down: Values
    up: Values
    number: str
    factor: float

    @property
    def rank(self) -> int:
        """The inner dimension."""
        return int(self.up.shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return int(self.down.nbytes + self.up.nbytes)


@dataclass(frozen=True)
class AdapterFacts:
    """What is known of an adapter without its values.

    `alpha` None: the file has none. `rank` is the greatest of its pairs, `nbytes` what they take,
    `targets` the full names of the weights that they change, sorted. `invocation_tokens` make it
    an activated one: it works from their last occurrence in a prompt on. `digest` is the SHA-256
    of all that changes results.
    """

    alpha: float | None
    rank: int
    nbytes: int
    targets: tuple[str, ...]
    task_name: str
    prompt_prefix: str
    invocation_tokens: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, eq=False)
class AdapterContent:
    """A whole adapter; `pairs` by the full name of the weight that they change, sorted."""

    pairs: Mapping[str, Pair]
    facts: AdapterFacts


def make_content(
    pairs: Mapping[str, Pair],
    *,
    alpha: float | None = None,
    task_name: str = "",
    prompt_prefix: str = "",
    invocation_tokens: tuple[int, ...] = (),
) -> AdapterContent:
    """Puts an adapter together and digests it."""
    in_order = {name: pairs[name] for name in sorted(pairs)}
    facts = AdapterFacts(
        alpha=alpha,
        rank=max((pair.rank for pair in pairs.values()), default=0),
        nbytes=sum(pair.nbytes for pair in pairs.values()),
        targets=tuple(in_order),
        task_name=task_name,
        prompt_prefix=prompt_prefix,
        invocation_tokens=invocation_tokens,
        digest=_digest(in_order, invocation_tokens),
    )
    return AdapterContent(in_order, facts)


def scale_factor(alpha: float | None, rank: int) -> float:
    """Returns what multiplies the user's scale; 0 is no alpha, as in llama.cpp.

    Source: llama_adapter_lora_weight::get_scale.
    """
    return alpha / rank if alpha else 1.0


def join_numbers(down: Values, up: Values, numbers: tuple[str, str]) -> tuple[Values, Values, str]:
    """Brings two factors to one number type: their own if they agree, else f32."""
    if numbers[0] == numbers[1]:
        return np.ascontiguousarray(down), np.ascontiguousarray(up), numbers[0]
    return as_float32(down, numbers[0]), as_float32(up, numbers[1]), "f32"


def as_float32(values: Values, number: str) -> npt.NDArray[np.float32]:
    """Returns values of a number type as float32, exactly."""
    if number == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)


def from_bytes(raw: npt.NDArray[np.uint8], number: str, shape: tuple[int, ...]) -> Values:
    """Reinterprets little-endian bytes; a view."""
    return raw.view(_STORED[number].newbyteorder("<")).reshape(shape)


def all_finite(values: Values, number: str) -> bool:
    """Whether no value is NaN or infinite."""
    if number == "bf16":
        return bool(((values & np.uint16(0x7F80)) != np.uint16(0x7F80)).all())
    return bool(np.isfinite(values).all())


def _digest(pairs: Mapping[str, Pair], invocation_tokens: tuple[int, ...]) -> bytes:
    total = hashlib.sha256()
    for name, pair in pairs.items():
        assert math.isfinite(pair.factor)
        head = (name, pair.number, pair.rank, *pair.down.shape, *pair.up.shape)
        total.update(repr(head).encode() + struct.pack("<d", pair.factor))
        total.update(np.ascontiguousarray(pair.down).data)
        total.update(np.ascontiguousarray(pair.up).data)
    total.update(repr(invocation_tokens).encode())
    return total.digest()

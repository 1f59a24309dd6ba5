"""The head that a slot file shares with llama.cpp's sequence-state files: its token list.

u32 magic, u32 version, u32 length of the payload in words, the payload. Packed, as written here:
i32 -1, u32 1, u32 n, n tokens, u32 0 (no media). A payload that does not begin with -1 is the plain
list. All little-endian. Knows bytes and token ids only.

Source: llama_state_seq_save_file and server_tokens::serialize of llama.cpp (contract 5.8).

Example:
    >>> head = pack_head([5, 6])
    >>> read_length(head[:HEAD_BYTES]), unpack_tokens(head[HEAD_BYTES:]).tolist()
    (6, [5, 6])
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from engine.step import IntArray

HEAD_BYTES = 12
# More than any context; a claim beyond it is not even read.
MAX_TOKENS = 1 << 24
_MAGIC = 0x67677371
_VERSION = 3
_PACKED = -1
_PACKED_VERSION = 1
_PACKED_WORDS = 4
_HEAD = struct.Struct("<III")
_PACKED_HEAD = struct.Struct("<iII")


class HeadError(ValueError):
    """Bytes that are no head."""


def pack_head(tokens: Sequence[int]) -> bytes:
    """Returns the head and its packed payload."""
    return (
        _HEAD.pack(_MAGIC, _VERSION, _PACKED_WORDS + len(tokens))
        + _PACKED_HEAD.pack(_PACKED, _PACKED_VERSION, len(tokens))
        + np.asarray(tokens, "<i4").tobytes()
        + struct.pack("<I", 0)
    )


def packed_bytes(num_tokens: int) -> int:
    """Returns how long `pack_head`'s result is."""
    return HEAD_BYTES + 4 * (_PACKED_WORDS + num_tokens)


def read_length(head: bytes) -> int:
    """Returns how many words of payload follow the first `HEAD_BYTES` bytes.

    Raises:
        HeadError: They are another file's, or claim more than any context holds.
    """
    if len(head) < HEAD_BYTES:
        raise HeadError(f"{len(head)} bytes, a head has {HEAD_BYTES}")
    magic, version, words = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise HeadError(f"the magic is {magic:#010x}, expected {_MAGIC:#010x}")
    if version != _VERSION:
        raise HeadError(f"the head has version {version}, expected {_VERSION}")
    if words > MAX_TOKENS + _PACKED_WORDS:
        raise HeadError(f"{words} words of tokens, the limit is {MAX_TOKENS + _PACKED_WORDS}")
    return words


def unpack_tokens(payload: bytes) -> IntArray:
    """Returns the tokens of a payload, packed or plain; int32 [n].

    Raises:
        HeadError: It is neither.
    """
    words = np.frombuffer(payload, "<i4")
    if not len(words) or words[0] != _PACKED:
        return words
    if len(words) < _PACKED_WORDS:
        raise HeadError(f"a packed list of {len(words)} words")
    _, version, count = _PACKED_HEAD.unpack_from(payload)
    if version != _PACKED_VERSION:
        raise HeadError(f"the packed list has version {version}, expected {_PACKED_VERSION}")
    if count != len(words) - _PACKED_WORDS:
        raise HeadError(f"the packed list claims {count} tokens in {len(words)} words")
    if words[-1] != 0:
        raise HeadError(f"{words[-1]} pieces of media; only text is supported")
    return words[3:-1]

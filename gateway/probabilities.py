"""Per-token probabilities, as the peer lists them."""

from __future__ import annotations

import math

from kvarts.v1 import generation_pb2

from gateway.peer_json import Json, to_float32

# How many bytes a UTF-8 sequence has, by its first byte: (mask, value, length).
_LEADS = ((0xE0, 0xC0, 2), (0xF0, 0xE0, 3), (0xF8, 0xF0, 4))


def entry(chunk: generation_pb2.Chunk, *, is_post_sampling: bool) -> dict[str, Json]:
    """One step: the text it released outside, the pieces of its best tokens inside."""
    sampled = chunk.logprobs.sampled
    text = chunk.text.encode()
    return {
        **_token(sampled.token_id, text, sampled.logprob, is_post_sampling),
        "top_probs" if is_post_sampling else "top_logprobs": [
            _token(token.token_id, token.piece, token.logprob, is_post_sampling)
            for token in chunk.logprobs.top
        ],
    }


def cut_incomplete(text: bytes) -> bytes:
    """Cuts off a character whose last bytes are missing; other faults stay.

    Source: the peer looks at the last four bytes only.
    """
    for behind in range(1, min(4, len(text)) + 1):
        byte = text[-behind]
        for mask, value, length in _LEADS:
            if byte & mask == value and behind < length:
                return text[:-behind]
    return text


def _token(token_id: int, text: bytes, logprob: float, is_post_sampling: bool) -> dict[str, Json]:
    return {
        "id": token_id,
        "token": cut_incomplete(text),
        "bytes": list(text),
        "prob" if is_post_sampling else "logprob": (
            to_float32(math.exp(logprob)) if is_post_sampling else logprob
        ),
    }

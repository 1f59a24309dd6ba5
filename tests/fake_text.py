"""Text without a vocabulary file: an alphabet as tokenizer, the best token as chain, plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.requests import Request
from engine.step import (
    RowLogits,
)


class FakeTokenizer:
    """One token per byte of a small alphabet: 0 is BOS, 1 is EOS, then newline and ASCII.

    The last three tokens are the bytes of the euro sign, so text can end inside a character.
    """

    bos_token = 0
    eos_token = 1
    add_bos = True
    add_eos = False
    eog_tokens = frozenset({1})

    def __init__(self) -> None:
        text = [b"\n"] + [bytes([code]) for code in range(0x20, 0x7F)]
        self._pieces = [b"<s>", b"</s>", *text, b"\xe2", b"\x82", b"\xac"]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces)}

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Any character that is not in the alphabet becomes a question mark."""
        unknown = self._ids[b"?"]
        head = [self.bos_token] if add_special else []
        return head + [self._ids.get(bytes([code]), unknown) for code in text.encode()]

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        if token_id < 2 and not render_special:
            return b""
        return self._pieces[token_id]

    def decode(self, token_ids: Sequence[int], *, render_special: bool) -> bytes:
        return b"".join(self.piece(i, render_special=render_special) for i in token_ids)

    def prompt_text(self, token_ids: Sequence[int]) -> bytes:
        return self.decode(token_ids, render_special=True).removeprefix(b" ")


@dataclass
class GreedyChain:
    """Takes the best token; knows biases and nothing else of sampling."""

    bias: dict[int, float]
    row: RowLogits | None = None
    token: int = -1

    def sample(self, row: RowLogits) -> int:
        logits = row.full().copy()
        for token_id, bias in self.bias.items():
            logits[token_id] += np.float32(bias)
        self.row = row
        self.token = int(np.argmax(logits))
        return self.token

    def probabilities(
        self, n: int, *, post_chain: bool
    ) -> tuple[float, Sequence[tuple[int, float]]]:
        """Of the raw logits; after a greedy choice all the probability is the chosen token's."""
        if post_chain:
            return 0.0, [(self.token, 0.0)][:n]
        assert self.row is not None
        ids, logits = self.row.top()
        total = self.row.log_sum_exp
        sampled = float(self.row.full()[self.token]) - total
        return sampled, [
            (int(i), float(x) - total) for i, x in zip(ids[:n], logits[:n], strict=True)
        ]


def begin_greedy(request: Request, seed: int) -> GreedyChain:
    bias = dict(request.sampling.logit_bias)
    if request.ignore_eos:
        bias |= dict.fromkeys(FakeTokenizer.eog_tokens, -math.inf)
    return GreedyChain(bias)


@dataclass(frozen=True)
class PlainRelease:
    text: str
    mid_character: bool = False
    stop_string: str | None = None


class PlainText:
    """Text as it comes: withholds only what is inside a character or may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = b""

    def push(self, piece: bytes, *, is_eog: bool = False) -> PlainRelease:
        self._held += piece
        try:
            text = self._held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return PlainRelease("", mid_character=True)
            text = self._held.decode(errors="replace")
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, stop = min(found)
            self._held = b""
            return PlainRelease(text[:at], stop_string=stop)
        ends = (text.endswith(stop[:n]) for stop in self._stops for n in range(1, len(stop)))
        if not is_eog and any(ends):
            return PlainRelease("")
        self._held = b""
        return PlainRelease(text)

    def unsent(self) -> str:
        return self._held.decode(errors="replace")

"""DRY's sequence breakers: from texts to the token sequences that spell them.

A breaker may begin inside one token and end inside another, so every token whose end could be the
start of the text is a head, and the tokens of the rest are its tail.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20

# Head token -> tails, each a token sequence; the empty tail means that the head is enough.
Breakers = dict[int, set[tuple[int, ...]]]


class WordIndex:
    """Finds tokens by what their bytes contain or end with, without a loop over the vocabulary."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._words = words
        self._text = b"".join(words)
        self._starts = list(accumulate(map(len, words), initial=0))
        self._by_last_byte: dict[int, list[int]] = {}
        for token_id, word in enumerate(words):
            if word:
                self._by_last_byte.setdefault(word[-1], []).append(token_id)

    def containing(self, part: bytes) -> Iterator[int]:
        """Yields the tokens that contain `part` (not empty)."""
        at = self._text.find(part)
        while at >= 0:
            token_id = bisect_right(self._starts, at) - 1
            end = self._starts[token_id + 1]
            if at + len(part) <= end:
                yield token_id
                at = self._text.find(part, end)
            else:
                at = self._text.find(part, at + 1)

    def ending_with(self, part: bytes) -> Iterator[int]:
        """Yields the tokens that end with `part` (not empty)."""
        for token_id in self._by_last_byte.get(part[-1], ()):
            if self._words[token_id].endswith(part):
                yield token_id


def find_breakers(
    texts: Iterable[str], *, words: WordIndex, tokenize: Callable[[str], Sequence[int]]
) -> Breakers:
    """Returns every token sequence that a breaker can be spelt with.

    Args:
        texts: The breakers; empty ones are skipped, long ones cut to 40 bytes.
        words: The vocabulary.
        tokenize: Tokenizes the rest of a breaker. A rest that begins inside a character is no
            text, so no sequence is made of it.

    Source: llama.cpp `get_overlapping_token_sequences`.
    """
    found: Breakers = {}
    for text in texts:
        breaker = text.encode("utf-8", "surrogatepass")[:MAX_BREAKER_BYTES]
        if not breaker:
            continue
        whole = set(words.containing(breaker))
        for head in whole:
            found.setdefault(head, set()).add(())
        for cut in range(1, len(breaker)):
            heads = set(words.ending_with(breaker[:cut])) - whole
            rest = _text(breaker[cut:])
            if not heads or rest is None:
                continue
            tail = tuple(tokenize(rest)[:_MAX_TAIL_TOKENS])
            for head in heads:
                found.setdefault(head, set()).add(tail)
    return found


def _text(utf8: bytes) -> str | None:
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return None

"""DRY's sequence breakers: which token sequences spell a given text.

A breaker may begin inside one token and end inside another, so every token whose end could be the
start of the text is a head, and the tokens of the rest are its tail. Tokens are looked at when a
window holds them: a request pays for its own tokens, never for the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from engine.errors import InvalidField

MAX_BREAKER_BYTES = 40
MAX_TAIL_TOKENS = 20

# From a token to the sequences that finish a breaker behind it.
Tails = Callable[[int], Collection[tuple[int, ...]]]

_NO_TAIL: frozenset[tuple[int, ...]] = frozenset()


class Breakers:
    """Answers for one token at a time what must follow it to spell a breaker.

    Source: llama.cpp `get_overlapping_token_sequences`.
    """

    def __init__(
        self,
        texts: Iterable[str],
        *,
        word: Callable[[int], bytes],
        tokenize: Callable[[str], Sequence[int]],
    ) -> None:
        """Reads the breakers; neither function is called yet.

        Args:
            texts: The breakers; empty ones are skipped, long ones cut to 40 bytes.
            word: The bytes of a token.
            tokenize: Tokenizes the rest of a breaker. What begins inside a character, or what the
                vocabulary cannot spell, no sequence is made of.
        """
        self._word = word
        self._tokenize = tokenize
        cut = (text.encode("utf-8", "surrogatepass")[:MAX_BREAKER_BYTES] for text in texts)
        self._breakers = tuple(dict.fromkeys(breaker for breaker in cut if breaker))
        self._longest_bytes = max(map(len, self._breakers), default=0)
        # Beginning of a breaker -> breakers that begin so and go on.
        self._by_beginning: dict[bytes, list[bytes]] = {}
        for breaker in self._breakers:
            for size in range(1, len(breaker)):
                self._by_beginning.setdefault(breaker[:size], []).append(breaker)
        self._tails: dict[int, Collection[tuple[int, ...]]] = {}
        self._tail_of: dict[bytes, tuple[int, ...] | None] = {}

    def tails(self, token_id: int) -> Collection[tuple[int, ...]]:
        """Returns the token sequences that finish a breaker behind a token.

        The empty sequence means that the token is enough; none at all, that it begins no breaker.
        Every sequence has at most `MAX_TAIL_TOKENS` tokens.
        """
        if not self._breakers:
            return _NO_TAIL
        known = self._tails.get(token_id)
        if known is None:
            known = self._tails[token_id] = self._find(self._word(token_id))
        return known

    def _find(self, word: bytes) -> Collection[tuple[int, ...]]:
        whole = {breaker for breaker in self._breakers if breaker in word}
        found: set[tuple[int, ...]] = {()} if whole else set()
        for start in range(max(0, len(word) - self._longest_bytes + 1), len(word)):
            beginning = word[start:]
            for breaker in self._by_beginning.get(beginning, ()):
                tail = None if breaker in whole else self._rest(breaker[len(beginning) :])
                if tail is not None:
                    found.add(tail)
        return found or _NO_TAIL

    def _rest(self, rest: bytes) -> tuple[int, ...] | None:
        """Returns the tokens of what is left of a breaker; None if there are none."""
        if rest not in self._tail_of:
            self._tail_of[rest] = self._spell(rest)
        return self._tail_of[rest]

    def _spell(self, rest: bytes) -> tuple[int, ...] | None:
        try:
            return tuple(self._tokenize(rest.decode())[:MAX_TAIL_TOKENS])
        except (UnicodeDecodeError, InvalidField):
            return None

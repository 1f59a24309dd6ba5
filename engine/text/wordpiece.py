"""WordPiece of plain text as BERT models use it. Knows no special tokens.

GGUF stores a piece that begins a word with U+2581 before it and one that continues a word bare.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from engine.errors import UnsupportedModel
from engine.text.token_table import TokenTable

_WORD_START = "\u2581"
_WHITE_SPACE = frozenset(
    "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
# CJK ideographs, each a word of its own. The range that begins at U+2B920 is the original's.
_IDEOGRAPHS = (
    range(0x4E00, 0xA000),
    range(0x3400, 0x4DC0),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2B740),
    range(0x2B740, 0x2B820),
    range(0x2B920, 0x2CEB0),
    range(0xF900, 0xFB00),
    range(0x2F800, 0x2FA20),
)


class WordPieceEncoder:
    """Plain text to ids. Immutable after construction, so threads may share it.

    Raises:
        UnsupportedModel: the vocabulary has no token for unknown words.
    """

    def __init__(self, table: TokenTable, *, lowercase: bool, strip_accents: bool) -> None:
        if table.special.unk is None:
            raise UnsupportedModel(
                "tokenizer.ggml.unknown_token_id", "WordPiece needs a token for unknown words"
            )
        self._unknown = table.special.unk
        self._lowercase = lowercase
        self._strip_accents = strip_accents
        self._ids = {spelt: token_id for token_id, spelt in enumerate(table.texts.spelt)}
        self._longest = max(map(len, self._ids))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text without special tokens.

        Source: llama.cpp `llm_tokenizer_wpm_session::tokenize`.
        """
        ids: list[int] = []
        for word in self._words(text):
            ids.extend(self._pieces(_bytes(_WORD_START + word)) or (self._unknown,))
        return ids

    def _pieces(self, word: bytes) -> list[int]:
        """Takes the longest token again and again; nothing if some rest has none."""
        ids: list[int] = []
        start = 0
        while start < len(word):
            # One byte more than the longest token is llama.cpp's bound; it can match nothing.
            for end in range(min(len(word), start + self._longest), start, -1):
                token_id = self._ids.get(word[start:end])
                if token_id is not None:
                    break
            else:
                return []
            ids.append(token_id)
            start = end
        return ids

    def _words(self, text: str) -> Iterator[str]:
        word: list[str] = []
        for char in self._normalized(text):
            if char not in _WHITE_SPACE and not _stands_alone(char):
                word.append(char)
                continue
            if word:
                yield "".join(word)
                word = []
            if char not in _WHITE_SPACE:
                yield char
        if word:
            yield "".join(word)

    def _normalized(self, text: str) -> Iterator[str]:
        for char in text:
            # The first character of the decomposition, and nothing for the accents behind it.
            base = unicodedata.normalize("NFD", char)[0] if self._strip_accents else char
            if base in _WHITE_SPACE:
                yield base
                continue
            category = unicodedata.category(base)
            if base == "\ufffd" or category in ("Cc", "Cf", "Co", "Cs"):
                continue
            if self._strip_accents and category[0] == "M":
                continue
            yield _lower(base) if self._lowercase else base


def _lower(char: str) -> str:
    # One character to one: llama.cpp's table has no entry where lower case takes two.
    lowered = char.lower()
    return lowered if len(lowered) == 1 else lowered[0]


def _stands_alone(char: str) -> bool:
    category = unicodedata.category(char)[0]
    if category == "P" or (category == "S" and ord(char) < 0x7F):
        return True
    return any(ord(char) in ideographs for ideographs in _IDEOGRAPHS)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

"""Text to token ids and back, as llama.cpp does both. Knows no file and no stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from engine.errors import InvalidField, TokenNotInVocab
from engine.text.special import SpecialPartition
from engine.text.tidy import tidied
from engine.text.token_table import HIDDEN, TokenTable


class TokenizerKind(Enum):
    """The algorithm, by llama.cpp's number for it (`vocab_type` of `/v1/models`)."""

    SPM = 1
    BPE = 2
    WORDPIECE = 3


class PlainEncoder(Protocol):
    """What turns text without special tokens into ids."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text."""
        ...


class Tokenizer:
    """A vocabulary with its encoder. Immutable, so any number of threads may share it.

    `first` and `last` are the tokens that `add_special` puts around a text (None: nothing);
    `add_space_prefix` puts a space before text that begins a prompt or follows a special token.
    `tidies_spaces` says that the echo of a prompt is tidied (`engine.text.tidy`).
    """

    def __init__(
        self,
        kind: TokenizerKind,
        table: TokenTable,
        pieces: Sequence[bytes],
        encoder: PlainEncoder,
        *,
        first: int | None,
        last: int | None,
        add_space_prefix: bool,
        tidies_spaces: bool,
    ) -> None:
        self.kind = kind
        self.special = table.special
        self.vocab_size = len(table)
        self.bos_token = table.special.bos
        self.eos_token = table.special.eos
        self.eog_tokens = table.eog_tokens
        self.add_bos = first is not None
        self.add_eos = last is not None
        self.pieces = pieces
        self._table = table
        self._partition = SpecialPartition(table)
        self._encoder = encoder
        self._first = first
        self._last = last
        self._add_space_prefix = add_space_prefix
        self._tidies_spaces = tidies_spaces

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the ids of a text.

        `add_special` puts BOS and EOS around it where the vocabulary wants them; `parse_special`
        finds control tokens in it (user-defined tokens are always found).

        Raises:
            InvalidField: the text holds a surrogate, or a character that the vocabulary lacks.

        Source: llama.cpp `llama_vocab::impl::tokenize`.
        """
        _refuse_surrogates(text)
        ids = [self._first] if add_special and self._first is not None else []
        follows_special = True
        for part in self._partition.split(text, parse_special=parse_special):
            if isinstance(part, int):
                ids.append(part)
                follows_special = True
                continue
            prefix = " " if self._add_space_prefix and follows_special else ""
            ids.extend(self._encoder.encode(prefix + part))
            follows_special = False
        if add_special and self._last is not None:
            ids.append(self._last)
        return ids

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        """Returns what a token prints as; control and unknown tokens only if `render_special`.

        Raises:
            TokenNotInVocab: the id is negative or past the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise TokenNotInVocab(token_id, self.vocab_size)
        if not render_special and self._table.attributes[token_id] & HIDDEN:
            return b""
        return self.pieces[token_id]

    def decode(self, token_ids: Iterable[int], *, render_special: bool) -> bytes:
        """Returns the pieces of the tokens, joined; a leading space is kept.

        Raises:
            TokenNotInVocab: an id is negative or past the vocabulary.

        Source: llama-server `tokens_to_str` (not `llama_detokenize`, which tidies spaces).
        """
        return b"".join(
            self.piece(token_id, render_special=render_special) for token_id in token_ids
        )

    def prompt_text(self, token_ids: Sequence[int]) -> bytes:
        """Returns a whole prompt as the echo of a request shows it, special tokens included.

        A first token loses the space that encoding put in front of it.

        Raises:
            TokenNotInVocab: an id is negative or past the vocabulary.

        Source: llama.cpp `llama_detokenize`, as llama-server calls it for the field `prompt`.
        """
        text = self.decode(token_ids, render_special=True)
        if self._add_space_prefix and token_ids:
            first = self.piece(token_ids[0], render_special=True)
            text = first.removeprefix(b" ") + text[len(first) :]
        return tidied(text) if self._tidies_spaces else text

    def find(self, text: str) -> int | None:
        """Returns the id of the token that is spelt so in the vocabulary, or None."""
        return self._table.ids.get(text)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        char = ord(text[error.start])
        raise InvalidField(
            "text", f"character {error.start} is the lone surrogate U+{char:04X}"
        ) from error

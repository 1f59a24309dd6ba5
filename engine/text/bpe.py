"""Byte-pair encoding of plain text, on the `tokenizers` package. Knows no special tokens.

The package refuses vocabularies that llama.cpp takes: a merge whose parts or result are no token
(files with a cut vocabulary have some). Such texts get phantom ids past the vocabulary, which
take part in merging and are then spelt out byte by byte, as llama.cpp does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import PreTokenizer as AnyPreTokenizer
from tokenizers.pre_tokenizers import Sequence as Steps

from engine.errors import InvalidField
from engine.text.pieces import byte_characters
from engine.text.pretokenizers import PreTokenizer
from engine.text.token_table import TokenTable

_PART_CHARS = 128 << 10
# Characters that are merged in a few milliseconds.
_SOON_CHARS = 16 << 10
_NEWLINES = re.compile("(\n+)")


class BpeEncoder:
    """Plain text to ids. Immutable after construction, so threads may share it."""

    def __init__(
        self, table: TokenTable, merges: Sequence[str], pre_tokenizer: PreTokenizer
    ) -> None:
        self._ids = table.ids
        self._pre_tokenizer = pre_tokenizer
        self._breaks = re.compile(pre_tokenizer.breaks) if pre_tokenizer.breaks else None
        broken = _broken(merges)
        pairs = _parse_merges([merge for merge in merges if merge not in broken])
        vocab = dict(zip(table.texts, range(len(table)), strict=True))
        for text in _broken(vocab):
            del vocab[text]
        phantoms = _phantom_texts(vocab, pairs, byte_level=pre_tokenizer.byte_level)
        self._spellings = {
            len(table) + rank: _spell(text, vocab, byte_level=pre_tokenizer.byte_level)
            for rank, text in enumerate(phantoms)
        }
        vocab.update((text, len(table) + rank) for rank, text in enumerate(phantoms))
        self._tokenizer = Tokenizer(
            BPE(
                vocab,
                pairs,
                ignore_merges=pre_tokenizer.ignores_merges,
                byte_fallback=not pre_tokenizer.byte_level,
            )
        )
        self._tokenizer.pre_tokenizer = _steps(pre_tokenizer)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text without special tokens.

        Raises:
            InvalidField: a word has millions of characters.
        """
        return [token_id for part in self._parts(text) for token_id in self._encode_part(part)]

    def _parts(self, text: str) -> Iterator[str]:
        """Cuts a long text where no word is cut.

        The package keeps about 160 bytes per character while it works, which a text of many
        megabytes would make gigabytes.
        """
        start = 0
        while self._breaks is not None and len(text) - start > _PART_CHARS:
            cut = self._breaks.search(text, start + _PART_CHARS)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _encode_part(self, text: str) -> Sequence[int]:
        if self._pre_tokenizer.escapes_spaces:
            text = text.replace(" ", "\u2581")
        if not self._pre_tokenizer.newline_words:
            return self._merge(text)
        return list(chain.from_iterable(self._merge_lines(text)))

    def _merge_lines(self, text: str) -> Iterator[Sequence[int]]:
        for word in _NEWLINES.split(text):
            token_id = self._ids.get(word) if word.startswith("\n") else None
            yield self._merge(word) if token_id is None else (token_id,)

    def _merge(self, text: str) -> list[int]:
        try:
            ids = self._ids_of(text)
        except BaseException as error:
            # The package panics, past every `except Exception`, where its regular expressions
            # meet a single word of about ten million characters.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidField(
                "text", f"{len(text)} characters without a break are too long for one word"
            ) from error
        if not self._spellings:
            return ids
        return list(chain.from_iterable(self._spellings.get(i, (i,)) for i in ids))

    def _ids_of(self, text: str) -> list[int]:
        if len(text) <= _SOON_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # Of the package's calls those for batches alone let go of the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def _broken(texts: Collection[str]) -> frozenset[str]:
    """The texts with bytes that are no UTF-8, as files with a damaged vocabulary have them.

    The package refuses these, and no word can come to be one: words have no such bytes, and merging
    joins whole characters.
    """
    if _is_utf8("".join(texts)):
        return frozenset()
    return frozenset(text for text in texts if not _is_utf8(text))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Splits each merge at its first space past the first character; a repeat keeps its rank."""
    spaces = (merge.find(" ", 1) for merge in merges)
    pairs = (
        (merge[:space], merge[space + 1 :])
        for merge, space in zip(merges, spaces, strict=True)
        if space > 0
    )
    return list(dict.fromkeys(pairs))


def _phantom_texts(
    ids: Mapping[str, int], pairs: Sequence[tuple[str, str]], *, byte_level: bool
) -> list[str]:
    """Texts that must be in the package's vocabulary and are not tokens."""
    texts = set(chain.from_iterable(pairs))
    texts.update([left + right for left, right in pairs])
    texts.update(byte_characters() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)])
    return sorted(texts - ids.keys())


def _spell(text: str, ids: Mapping[str, int], *, byte_level: bool) -> tuple[int, ...]:
    """The tokens of the single bytes of a text that is no token; bytes without one vanish.

    Source: llama.cpp `llm_tokenizer_bpe_session::tokenize`. It looks up the bytes of the text as
    stored, so at byte level only ASCII characters can have one.
    """
    spelt = (
        ids.get(chr(byte) if byte_level else f"<0x{byte:02X}>")
        for byte in text.encode("utf-8", "surrogateescape")
        if byte < 0x80 or not byte_level
    )
    return tuple(token_id for token_id in spelt if token_id is not None)


def _steps(pre_tokenizer: PreTokenizer) -> AnyPreTokenizer:
    splits: list[AnyPreTokenizer] = [
        Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns
    ]
    if pre_tokenizer.byte_level:
        splits.append(ByteLevel(add_prefix_space=False, use_regex=False))
    return Steps(splits)

"""SentencePiece BPE of plain text, on the `sentencepiece` package. Knows no special tokens.

The model is built in memory. Every token enters it as an ordinary piece, because llama.cpp merges
whatever is in the vocabulary (control tokens too), and special tokens are cut out before.
User-defined runs of spaces are stored with literal spaces, so escaped text never meets them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, cast

import sentencepiece as spm

from engine.errors import InvalidField, ModelFileError
from engine.text.token_table import TokenTable

_WORD_START = "\u2581"

# Field numbers and values of sentencepiece_model.proto, as encoded tags (number << 3 | wire type).
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER = 0x0A, 0x12, 0x1A
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 0x0A, 0x15, 0x18
_TYPE_UNKNOWN, _TYPE_BYTE = 2, 6
_TRAINER_MODEL_TYPE, _MODEL_TYPE_BPE = b"\x18", 2
_TRAINER_BYTE_FALLBACK = b"\x98\x02"
_NORMALIZER_NAME = 0x0A
_NORMALIZER_FLAGS = (b"\x18", b"\x20", b"\x28")  # dummy prefix, extra white space, escaping


class SpmEncoder:
    """Plain text to ids. Immutable after construction, so threads may share it.

    Raises:
        ModelFileError: the vocabulary does not load.
    """

    def __init__(self, table: TokenTable) -> None:
        self._num_tokens = len(table)
        self._byte_ids = _byte_ids(table)
        self._falls_back = all(f"<0x{byte:02X}>" in table.ids for byte in range(256))
        processor = cast(Any, spm.SentencePieceProcessor())
        try:
            processor.LoadFromSerializedProto(_model(table, byte_fallback=self._falls_back))
        except RuntimeError as error:
            raise ModelFileError("tokenizer.ggml.tokens", str(error)) from error
        self._processor = processor

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text without special tokens; no space is put before it.

        Raises:
            InvalidField: a character is no token and neither are its bytes.

        Source: llama.cpp `llm_tokenizer_spm_session::tokenize`.
        """
        escaped = text.replace(" ", _WORD_START)
        if self._falls_back:
            return self._processor.EncodeAsIds(escaped)
        return list(self._with_unknown(escaped))

    def _with_unknown(self, text: str) -> Iterator[int]:
        for piece in self._processor.EncodeAsImmutableProto(text).pieces:
            if piece.id < self._num_tokens:
                yield piece.id
                continue
            for byte in cast(str, piece.surface).encode():
                token_id = self._byte_ids[byte]
                if token_id is None:
                    raise InvalidField("text", f"the vocabulary has no token for byte 0x{byte:02X}")
                yield token_id


def _byte_ids(table: TokenTable) -> list[int | None]:
    """The token of each byte: `<0xXX>`, or one whose text is that byte alone."""
    ids: Mapping[str, int] = table.ids
    return [
        ids.get(f"<0x{byte:02X}>", ids.get(chr(byte)) if byte < 0x80 else None)
        for byte in range(256)
    ]


def _model(table: TokenTable, *, byte_fallback: bool) -> bytes:
    """Encodes a ModelProto by hand: the package's own generated class needs its protobuf module.

    The unknown piece that the format demands comes after the vocabulary, so ids are kept.
    """
    byte_tokens = _byte_pieces(table) if byte_fallback else frozenset[int]()
    parts = [
        _piece(text, score, _TYPE_BYTE if token_id in byte_tokens else None)
        for token_id, (text, score) in enumerate(zip(table.texts, table.scores, strict=True))
    ]
    parts.append(_piece(_unused_text(table.ids), 0.0, _TYPE_UNKNOWN))
    trainer = _TRAINER_MODEL_TYPE + _varint(_MODEL_TYPE_BPE)
    trainer += _TRAINER_BYTE_FALLBACK + _varint(byte_fallback)
    parts.append(_field(_MODEL_TRAINER, trainer))
    normalizer = _field(_NORMALIZER_NAME, b"identity")
    normalizer += b"".join(flag + _varint(False) for flag in _NORMALIZER_FLAGS)
    parts.append(_field(_MODEL_NORMALIZER, normalizer))
    return b"".join(parts)


def _byte_pieces(table: TokenTable) -> frozenset[int]:
    """The tokens that the package must know as bytes, whatever the file calls them."""
    spelt = (table.ids.get(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in spelt if token_id is not None)


def _unused_text(ids: Mapping[str, int]) -> str:
    text = "<unk>"
    while text in ids:
        text += ">"
    return text


def _piece(text: str, score: float, piece_type: int | None) -> bytes:
    body = _field(_PIECE_TEXT, text.encode("utf-8", "surrogateescape"))
    body += struct.pack("<Bf", _PIECE_SCORE, score)
    if piece_type is not None:
        body += bytes([_PIECE_TYPE, piece_type])
    return _field(_MODEL_PIECES, body)


def _field(tag: int, payload: bytes) -> bytes:
    return bytes([tag]) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

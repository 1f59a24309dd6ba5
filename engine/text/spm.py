"""SentencePiece BPE of plain text, on the `sentencepiece` package. Knows no special tokens.

The model is built in memory. Every token enters it as an ordinary piece, because llama.cpp merges
whatever is in the vocabulary (control tokens too), and special tokens are cut out before.
User-defined runs of spaces are stored with literal spaces, so escaped text never meets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import sentencepiece as spm

from engine.errors import InvalidField, ModelFileError
from engine.text.token_table import TokenTable

_WORD_START = "\u2581"

# Field numbers and values of sentencepiece_model.proto, as encoded tags (number << 3 | wire type).
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER = 0x0A, 0x12, 0x1A
_PIECE_TEXT, _PIECE_SCORE = 0x0A, b"\x15"
_UNKNOWN_MARK, _BYTE_MARK = b"\x18\x02", b"\x18\x06"
_NO_SCORE = bytes(4)
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
        # The package spells unknown characters in bytes only if it knows all of them. What the
        # vocabulary lacks comes behind it, and is a single-character token or nothing.
        missing = [byte for byte in range(256) if _byte_text(byte) not in table.ids]
        self._stand_ins = {
            len(table) + place: (byte, table.ids.get(chr(byte)) if byte < 0x80 else None)
            for place, byte in enumerate(missing)
        }
        processor = cast(Any, spm.SentencePieceProcessor())
        try:
            processor.LoadFromSerializedProto(_model(table, missing))
        except RuntimeError as error:
            raise ModelFileError("tokenizer.ggml.tokens", str(error)) from error
        self._processor = processor

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text without special tokens; no space is put before it.

        Raises:
            InvalidField: a character is no token and neither are its bytes.

        Source: llama.cpp `llm_tokenizer_spm_session::tokenize`.
        """
        ids: list[int] = self._processor.EncodeAsIds(text.replace(" ", _WORD_START))
        return [self._stand_in(token_id) for token_id in ids] if self._stand_ins else ids

    def _stand_in(self, token_id: int) -> int:
        if token_id not in self._stand_ins:
            return token_id
        byte, real = self._stand_ins[token_id]
        if real is None:
            raise InvalidField("text", f"the vocabulary has no token for byte 0x{byte:02X}")
        return real


def _byte_text(byte: int) -> str:
    return f"<0x{byte:02X}>"


def _model(table: TokenTable, missing_bytes: Sequence[int]) -> bytes:
    """Encodes a ModelProto by hand: the package's own generated class needs its protobuf module.

    The unknown piece that the format demands comes last, so ids are kept.
    """
    byte_texts = {_byte_text(byte).encode() for byte in range(256)}
    model = bytearray()
    scores = table.scores.astype("<f4").tobytes()
    for number, text in enumerate(table.texts.spelt):
        score = scores[4 * number : 4 * number + 4]
        model += _piece(text, score, _BYTE_MARK if text in byte_texts else b"")
    for byte in missing_bytes:
        model += _piece(_byte_text(byte).encode(), _NO_SCORE, _BYTE_MARK)
    model += _piece(_unused_text(table.ids).encode(), _NO_SCORE, _UNKNOWN_MARK)
    trainer = _TRAINER_MODEL_TYPE + _varint(_MODEL_TYPE_BPE)
    trainer += _TRAINER_BYTE_FALLBACK + _varint(True)
    model += _field(_MODEL_TRAINER, trainer)
    normalizer = _field(_NORMALIZER_NAME, b"identity")
    normalizer += b"".join(flag + _varint(False) for flag in _NORMALIZER_FLAGS)
    model += _field(_MODEL_NORMALIZER, normalizer)
    return bytes(model)


def _unused_text(ids: Mapping[str, int]) -> str:
    text = "<unk>"
    while text in ids:
        text += ">"
    return text


def _piece(text: bytes, score: bytes, mark: bytes) -> bytes:
    """`score` is a little-endian float32, `mark` the field of the type; none for a normal piece."""
    return _field(_MODEL_PIECES, _field(_PIECE_TEXT, text) + _PIECE_SCORE + score + mark)


def _field(tag: int, payload: bytes) -> bytes:
    length = len(payload)
    if length > 0x7F:
        return bytes((tag,)) + _varint(length) + payload
    return bytes((tag, length)) + payload  # nearly every piece of a vocabulary


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

"""What each token prints as, in bytes. Knows no encoder."""

from __future__ import annotations

from collections.abc import Callable

from engine.gguf.strings import Strings
from engine.text.token_table import BYTE, HIDDEN, NORMAL, USER_DEFINED, TokenTable

_WORD_START = "\u2581"


def byte_characters() -> list[str]:
    """Returns the printable character that stands for each byte 0..255 in byte-level BPE.

    Source: GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the others follow
    from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def build_pieces(table: TokenTable, *, byte_level: bool) -> Strings:
    """Returns the bytes of every token, special tokens included.

    Special and user-defined tokens print as they are spelt, normal ones with their spaces or
    bytes restored, byte tokens as their byte, unused ones as nothing.

    Source: llama.cpp `llama_vocab::impl::token_to_piece`.
    """
    restore = _byte_decoder() if byte_level else _restore_spaces
    return Strings(
        _piece(text, attribute, restore)
        for text, attribute in zip(table.texts, table.attributes, strict=True)
    )


def _piece(text: str, attribute: int, restore: Callable[[str], bytes]) -> bytes:
    if attribute & (HIDDEN | USER_DEFINED):
        return _raw(text)
    if attribute & NORMAL:
        return restore(text)
    if attribute & BYTE:
        return bytes([parse_byte_token(text)])
    return b""


def parse_byte_token(text: str) -> int:
    """Returns the byte of a `<0xXX>` token; 0 where the digits are none, as C's strtol gives."""
    try:
        return int(text[3:5], 16) & 0xFF
    except ValueError:
        return 0


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _restore_spaces(text: str) -> bytes:
    return _raw(text.replace(_WORD_START, " "))


def _byte_decoder() -> Callable[[str], bytes]:
    byte_of = {char: byte for byte, char in enumerate(byte_characters())}
    # Latin-1 characters outside the alphabet are moved out of Latin-1, so that encoding a token
    # fails if it holds any other character: one pass in C for nearly every token.
    table = str.maketrans(
        {chr(byte): "\uffff" for byte in range(256)}
        | {char: chr(byte) for char, byte in byte_of.items()}
    )

    def decode(text: str) -> bytes:
        try:
            return text.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            return b"".join(
                bytes([byte_of[char]]) if char in byte_of else _unknown_byte(char, text)
                for char in text
            )

    return decode


def _unknown_byte(char: str, text: str) -> bytes:
    # llama.cpp's own marker, token text and missing ">" included: clients have seen it.
    return b"[UNK_BYTE_0x" + _raw(char).hex().encode() + _raw(text) + b"]"

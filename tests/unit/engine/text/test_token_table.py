from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.errors import ModelFileError
from engine.text.pieces import build_pieces
from engine.text.token_table import SpecialIds, TokenTable, build_token_table

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def table_of(rows: Sequence[tuple[str, int]], special: SpecialIds | None = None) -> TokenTable:
    return build_token_table(
        [text.encode() for text, _ in rows],
        scores=None,
        types=[kind for _, kind in rows],
        special=special or SpecialIds(),
        strip_right=False,
        strip_left=None,
    )


class TestEndTokens:
    def test_named_ids_and_well_known_texts(self) -> None:
        rows = [
            ("a", NORMAL),
            ("<eot-of-mine>", CONTROL),
            ("<|im_end|>", NORMAL),
            ("</s>", CONTROL),
        ]
        table = table_of(rows, SpecialIds(eos=0, eot=1))
        assert table.eog_tokens == {0, 1, 2, 3}

    def test_infill_padding_and_repository_marks_end_too(self) -> None:
        rows = [("<|fim_pad|>", CONTROL), ("<|repo_name|>", CONTROL), ("<|file_sep|>", CONTROL)]
        table = table_of([*rows, ("<|fim_prefix|>", CONTROL)])
        assert table.eog_tokens == {0, 1, 2}
        assert (table.special.fim_pad, table.special.fim_rep, table.special.fim_sep) == (0, 1, 2)
        assert table.special.fim_pre == 3

    @pytest.mark.parametrize("others", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
    def test_end_of_a_message_is_no_end_of_a_harmony_turn(self, others: tuple[str, str]) -> None:
        table = table_of([("<|end|>", CONTROL), *((text, CONTROL) for text in others)])
        assert table.eog_tokens == {1, 2}
        # Shown: output parsers have to see it.
        assert build_pieces(table, byte_level=True)[0] == b"<|end|>"
        assert table.tokens_with(16) == [0]

    def test_gemma4s_s_is_an_ordinary_token(self) -> None:
        table = table_of([("</s>", NORMAL), ("<|tool_response>", CONTROL)])
        assert table.eog_tokens == {1}
        assert table.tokens_with(8) == [1]

    def test_ends_are_hidden_even_if_the_file_calls_them_normal(self) -> None:
        table = table_of([("<|im_end|>", NORMAL), ("b", NORMAL)])
        assert table.tokens_with(8) == [0]


class TestPieces:
    def test_spm(self) -> None:
        rows = [
            *(("\u2581a", NORMAL), ("<0x0A>", BYTE), ("<0xzz>", BYTE), ("<s>", CONTROL)),
            *(("\u2581u", USER_DEFINED), ("spare", UNUSED), ("\u00e9", NORMAL)),
        ]
        assert build_pieces(table_of(rows), byte_level=False) == [
            *(b" a", b"\n", b"\0", b"<s>"),
            *("\u2581u".encode(), b"", "\u00e9".encode()),
        ]

    def test_byte_level(self) -> None:
        rows = [("\u0120a\u010a", NORMAL), ("\u00c3\u00a9", NORMAL), ("\u0120x", USER_DEFINED)]
        assert build_pieces(table_of(rows), byte_level=True) == [
            *(b" a\n", b"\xc3\xa9", "\u0120x".encode())
        ]

    @pytest.mark.parametrize(
        ("text", "char"), [("a b", " "), ("a\u2581", "\u2581"), ("\xa0", "\xa0")]
    )
    def test_what_is_no_byte_prints_as_llama_cpp_prints_it(self, text: str, char: str) -> None:
        mark = f"[UNK_BYTE_0x{char.encode().hex()}{text}]"
        expected = text.replace(char, mark, 1).encode()
        assert build_pieces(table_of([(text, NORMAL)]), byte_level=True) == [expected]


@pytest.mark.parametrize("name", ["scores", "types"])
def test_arrays_that_are_too_short_are_refused(name: str) -> None:
    arrays: dict[str, Sequence[float] | None] = {"scores": None, "types": None, name: [1]}
    with pytest.raises(ModelFileError, match="1 entries for 2 tokens"):
        build_token_table(
            [b"a", b"b"],
            scores=arrays["scores"],
            types=arrays["types"],  # pyright: ignore[reportArgumentType] both hold ints here
            special=SpecialIds(),
            strip_right=False,
            strip_left=None,
        )

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.special import SpecialPartition
from engine.text.token_table import SpecialIds, TokenTable, build_token_table

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def table_of(
    rows: Sequence[tuple[str, int]], *, strip_right: bool = False, strip_left: str | None = None
) -> TokenTable:
    return build_token_table(
        [text.encode("utf-8", "surrogateescape") for text, _ in rows],
        scores=None,
        types=[kind for _, kind in rows],
        special=SpecialIds(),
        strip_right=strip_right,
        strip_left=strip_left,
    )


def split(table: TokenTable, text: str, *, parse_special: bool = True) -> list[int | str]:
    return list(SpecialPartition(table).split(text, parse_special=parse_special))


def reference_split(tokens: Sequence[str], text: str) -> list[int | str]:
    """Takes one token after the other, longest first, out of every run that is still text."""
    parts: list[int | str] = [text] if text else []
    for token in sorted(tokens, key=lambda token: -len(token.encode())):
        cut: list[int | str] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for number, run in enumerate(part.split(token)):
                cut.extend([tokens.index(token)] if number else [])
                cut.extend([run] if run else [])
        parts = cut
    return parts


class TestSplit:
    @settings(max_examples=300, deadline=None)
    @given(
        # Of different lengths: which of two equally long tokens goes first is not defined.
        st.lists(
            st.text("ab<\u00e9 ", min_size=1, max_size=6),
            unique_by=lambda text: len(text.encode()),
            min_size=1,
        ),
        st.text("ab<\u00e9 ", max_size=40),
    )
    def test_takes_what_one_by_one_would_take(self, tokens: list[str], text: str) -> None:
        table = table_of([(token, CONTROL) for token in tokens])
        assert split(table, text) == reference_split(tokens, text)

    def test_a_longer_token_to_the_right_wins(self) -> None:
        table = table_of([("ab", CONTROL), ("bcd", CONTROL)])
        assert split(table, "abcd") == ["a", 1]

    def test_user_defined_always_others_when_parsed(self) -> None:
        table = table_of([("<u>", USER_DEFINED), ("<c>", CONTROL), ("<k>", UNKNOWN), ("x", NORMAL)])
        text = "<u><c><k>x"
        assert split(table, text) == [0, 1, 2, "x"]
        assert split(table, text, parse_special=False) == [0, "<c><k>x"]

    def test_white_space_goes_with_tokens_that_strip(self) -> None:
        rows = [("<|user|>", CONTROL), ("<s>", CONTROL), ("</s>", NORMAL), ("<mask>", USER_DEFINED)]
        right = table_of(rows, strip_right=True)
        assert split(right, "<|user|> \n a <s> b") == [0, "a ", 1, " b"]
        left = table_of(rows, strip_left="<mask>")
        assert split(left, "a \n<mask> b") == ["a", 3, " b"]
        assert split(left, " <mask>") == [3]

    def test_plain_and_empty_text(self) -> None:
        table = table_of([("<c>", CONTROL)])
        assert split(table, "") == []
        assert split(table, "plain") == ["plain"]
        assert split(table_of([("x", NORMAL)]), "x") == ["x"]

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.grammar.trigger_pattern import PatternError, PatternSearch, escape, parse_pattern

ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "\\w", "\\d", "(?:ab)", "x", "\\s"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{1,2}", "{2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        inner.map(lambda part: f"({part})"),
        inner.map(lambda part: f"^{part}"),
        inner.map(lambda part: f"{part}$"),
    )


def beginning(pattern: str, text: str) -> int | None:
    """Python's own answer: the first group that is not empty, else the match."""
    found = re.search(pattern, text.encode().decode("latin-1"), re.ASCII)
    if found is None:
        return None
    groups = range(1, (found.re.groups or 0) + 1)
    return next((found.start(i) for i in groups if found.group(i)), found.start())


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(ATOMS, _grown, max_leaves=5), st.lists(st.text("ab x1", max_size=3), max_size=5)
)
def test_the_first_piece_that_completes_a_match_is_found(pattern: str, pieces: list[str]):
    search = PatternSearch(parse_pattern(pattern))
    text = ""
    for piece in pieces:
        text += piece
        found = search.push(piece.encode())
        expected = beginning(pattern.replace("$", "\\Z"), text)
        assert found == expected
        if found is not None:
            return


def test_time_is_linear_where_backtracking_is_not():
    search = PatternSearch(parse_pattern("(?:(?:a+)+)+b"))
    assert search.push(b"a" * 3000) is None
    assert search.push(b"b") == 0


def test_an_escaped_text_matches_itself():
    text = "".join(map(chr, range(32, 127)))
    assert PatternSearch(parse_pattern(escape(text))).push(b"!" + text.encode()) == 1


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "missing )"),
        (")", "unbalanced )"),
        ("[a", "missing ]"),
        ("*", "nothing to repeat"),
        ("a{2", "malformed"),
        ("a{3,1}", "malformed"),
        ("(?=a)", "look-around"),
        ("(?<!a)", "look-around"),
        ("(a)\\1", "back-references"),
        ("[é-z]", "ASCII"),
        ("\\q", "unknown escape"),
        ("a{1000}{1000}", "more than"),
        ("a" * 5000, "more than"),
        ("(" * 60 + ")" * 60, "nested"),
    ],
)
def test_refusals(pattern: str, problem: str):
    with pytest.raises(PatternError, match=re.escape(problem)):
        parse_pattern(pattern)

"""Grammars against an oracle that derives texts, on every text of a small alphabet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadGrammar, GrammarDeadEnd
from tests.unit.engine.text.grammar.spelling import (
    CONTROL,
    END,
    LONGER,
    TOOL,
    SpellingTokenizer,
    compiled,
    matches,
)

ALPHABET = "ab"
TEXTS = ["".join(chars) for n in range(6) for chars in itertools.product(ALPHABET, repeat=n)]


@dataclass(frozen=True)
class Rule:
    """What an oracle derives from: text of GBNF, and the spans that it covers."""

    gbnf: str
    kind: str
    parts: tuple[Rule, ...] = ()
    low: int = 0
    high: int | None = None
    text: str = ""


def ends(rule: Rule, rules: Mapping[str, Rule], text: str, begin: int, depth: int) -> set[int]:
    """Where texts of a rule that begin at `begin` may end; plain recursion, bounded in depth."""
    if depth > 14:
        return set()
    match rule.kind:
        case "chars":
            found = text[begin : begin + 1]
            return {begin + 1} if found and found in rule.text else set()
        case "literal":
            return {begin + len(rule.text)} if text.startswith(rule.text, begin) else set()
        case "ref":
            return ends(rules[rule.text], rules, text, begin, depth + 1)
        case "sequence":
            here = {begin}
            for part in rule.parts:
                here = {e for b in here for e in ends(part, rules, text, b, depth + 1)}
            return here
        case "choice":
            return {e for part in rule.parts for e in ends(part, rules, text, begin, depth + 1)}
        case _:
            here, result = {begin}, {begin} if rule.low == 0 else set[int]()
            for count in range(1, 9 if rule.high is None else rule.high + 1):
                here = {e for b in here for e in ends(rule.parts[0], rules, text, b, depth + 1)}
                if count >= rule.low:
                    result |= here
            return result


def _repeat(item: Rule, bounds: tuple[str, int, int | None]) -> Rule:
    mark, low, high = bounds
    return Rule(f"({item.gbnf}){mark}", "repeat", (item,), low, high)


LEAVES = st.one_of(
    st.sampled_from(["a", "b", "ab", "ba"]).map(lambda t: Rule(f'"{t}"', "literal", text=t)),
    st.sampled_from(["a", "b", "ab"]).map(lambda t: Rule(f"[{t}]", "chars", text=t)),
)
BOUNDS = st.sampled_from(
    [("*", 0, None), ("+", 1, None), ("?", 0, 1), ("{2}", 2, 2), ("{1,3}", 1, 3)]
)


def bodies(leaves: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(
                lambda p: Rule(" ".join(f"({x.gbnf})" for x in p), "sequence", tuple(p))
            ),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda p: Rule(" | ".join(x.gbnf for x in p), "choice", tuple(p))
            ),
            st.tuples(inner, BOUNDS).map(lambda pair: _repeat(*pair)),
        ),
        max_leaves=6,
    )


@settings(max_examples=120, deadline=None)
@given(bodies(LEAVES))
def test_grammars_without_recursion_match_what_the_oracle_derives(body: Rule):
    grammar = compiled(f"root ::= {body.gbnf}")
    for text in TEXTS:
        assert matches(grammar, text) == (len(text) in ends(body, {}, text, 0, 0)), text


# Every alternative that comes back to the rule begins with a character, so nothing is recursive on
# the left, and the oracle's depth is that of the text.
REFS = st.sampled_from(["a", "b"]).map(
    lambda t: Rule(
        f'"{t}" again',
        "sequence",
        (Rule("", "literal", text=t), Rule("", "ref", text="again")),
    )
)


@settings(max_examples=120, deadline=None)
@given(bodies(LEAVES), bodies(LEAVES), REFS)
def test_recursive_grammars_match_what_the_oracle_derives(first: Rule, last: Rule, again: Rule):
    rule = Rule(
        f"{again.gbnf} ({last.gbnf}) | {first.gbnf}",
        "choice",
        (
            Rule("", "sequence", (*again.parts, last)),
            first,
        ),
    )
    grammar = compiled(f"root ::= again\nagain ::= {rule.gbnf}")
    for text in TEXTS[:31]:
        assert matches(grammar, text) == (len(text) in ends(rule, {"again": rule}, text, 0, 0)), (
            text
        )


@settings(max_examples=60, deadline=None)
@given(bodies(LEAVES), st.text(ALPHABET, max_size=4))
def test_a_mask_is_what_is_allowed_one_by_one(body: Rule, text: str):
    state = compiled(f"root ::= {body.gbnf}").begin()
    for value in text.encode():
        if not state.allows(value):
            break
        state.accept(value)
    mask = state.mask()
    assert [i for i in range(SpellingTokenizer.vocab_size) if state.allows(i)] == list(
        np.flatnonzero(mask)
    )
    assert mask[END] == state.is_complete


def test_any_spelling_in_tokens_is_allowed():
    mask = compiled('root ::= "ab" "a"').begin().mask()
    assert list(np.flatnonzero(mask)) == [
        ord("a"),
        256 + LONGER.index("ab"),
        256 + LONGER.index("aba"),
    ]


def test_only_an_end_follows_a_complete_text():
    state = compiled('root ::= "ab"').begin()
    state.accept(256)
    assert list(np.flatnonzero(state.mask())) == [END]
    state.accept(END)
    assert state.is_complete


def test_characters_are_matched_across_tokens():
    grammar = compiled("root ::= [é日]+")
    assert matches(grammar, "日é")
    assert not matches(grammar, "本")
    state = grammar.begin()
    state.accept("日".encode()[0])
    assert not state.is_complete
    assert not state.allows(ord("a"))


@pytest.mark.parametrize("value", [0, 0x80, 0xFF])
def test_bytes_of_no_text_never_match(value: int):
    assert not compiled("root ::= .*").begin().allows(value)


def test_a_hidden_token_follows_only_where_it_is_named():
    state = compiled("root ::= .* | <|tool|>").begin()
    assert state.allows(TOOL)
    assert not state.allows(TOOL + 1)
    state = compiled(f'root ::= "{CONTROL[1]}"').begin()
    assert not state.allows(TOOL + 1)


def test_a_token_that_is_shown_is_matched_by_its_text():
    state = compiled(f'root ::= "{CONTROL[1]}"', shown=frozenset({TOOL + 1})).begin()
    assert state.allows(TOOL + 1)
    state.accept(TOOL + 1)
    assert state.is_complete


def test_a_negated_token_is_any_other():
    state = compiled("root ::= !<[97]> <[98]>").begin()
    assert not state.allows(97)
    assert state.allows(TOOL)
    state.accept(99)
    assert list(np.flatnonzero(state.mask())) == [98]


def test_a_token_that_does_not_fit_is_named():
    state = compiled('root ::= "ab"').begin()
    with pytest.raises(GrammarDeadEnd) as raised:
        state.accept(ord("x"))
    assert (raised.value.piece, raised.value.token_id) == ("x", ord("x"))


def test_a_grammar_that_matches_nothing_is_refused():
    with pytest.raises(BadGrammar, match="no text matches"):
        compiled('root ::= "a" [z-a]')


def test_a_rule_that_never_ends_is_run_until_something_else_ends_it():
    state = compiled('root ::= "a" root').begin()
    for _ in range(5):
        state.accept(ord("a"))
    assert not state.is_complete
    assert list(np.flatnonzero(state.mask())) == [ord("a"), 256 + 0][:1]


def test_generations_do_not_share_their_place():
    grammar = compiled('root ::= "ab"')
    first, second = grammar.begin(), grammar.begin()
    first.accept(ord("a"))
    assert second.allows(ord("a"))
    assert not first.allows(ord("a"))

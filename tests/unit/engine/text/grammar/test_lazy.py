import pytest

from engine.constraint import ConstraintState
from engine.errors import GrammarDeadEnd
from engine.text.grammar.lazy import CallGrammar, LazyGrammar, Triggers
from tests.unit.engine.text.grammar.spelling import END, LONGER, TOOL, compiled

THE = 256 + LONGER.index(" the")


def begin(grammar: str, triggers: Triggers):
    return LazyGrammar(compiled(grammar, shown=triggers.tokens), triggers).begin()


def feed(state: ConstraintState, text: str) -> None:
    for value in text.encode():
        assert state.allows(value)
        state.accept(value)


def test_anything_may_come_before_the_trigger():
    state = begin('root ::= "go" [0-9]', Triggers.of(words=["go"]))
    feed(state, "now they ")
    assert state.is_complete
    assert not state.is_active
    feed(state, "go")
    assert state.is_active
    assert not state.is_complete
    assert not state.allows(ord("x"))
    feed(state, "7")
    assert state.is_complete


def test_a_word_may_lie_across_tokens_and_begin_inside_one():
    # The grammar goes on behind the whole token, "the y" that is.
    state = begin('root ::= "he" " y"', Triggers.of(words=["he"]))
    state.accept(THE)
    assert state.is_active
    feed(state, " y")
    assert state.is_complete


def test_what_comes_with_the_trigger_must_fit():
    state = begin('root ::= "t" "x"', Triggers.of(words=["t"]))
    with pytest.raises(GrammarDeadEnd) as raised:
        state.accept(THE)
    assert (raised.value.piece, raised.value.token_id) == ("the", THE)


def test_a_token_triggers_and_is_part_of_the_text():
    state = begin('root ::= "<|tool|>" "a"', Triggers.of(tokens=[TOOL]))
    feed(state, "xx")
    state.accept(TOOL)
    feed(state, "a")
    assert state.is_complete


def test_a_pattern_starts_the_grammar_at_its_first_group():
    state = begin('root ::= "{" "}"', Triggers.of(patterns=["call: *(\\{)"]))
    feed(state, "call:  {}")
    assert state.is_complete
    assert state.is_active


def test_a_full_pattern_must_match_everything():
    triggers = Triggers.of(full_patterns=["a+(b)"])
    state = begin('root ::= "b" "c"', triggers)
    feed(state, "xaab")
    assert not state.is_active
    state = begin('root ::= "b" "c"', triggers)
    feed(state, "aabc")
    assert state.is_complete
    assert state.is_active


def test_an_end_may_come_while_nothing_was_triggered():
    state = begin('root ::= "a"', Triggers.of(words=["zz"]))
    assert state.allows(END)
    state.accept(END)


def begin_calls(grammar: str, *, is_required: bool):
    triggers = Triggers.of(words=["t"])
    return CallGrammar(compiled(grammar), triggers, is_required=is_required).begin()


def test_a_call_grammar_looks_ahead():
    state = begin_calls('root ::= "t" "x"', is_required=False)
    assert not state.allows(THE)
    assert not state.mask()[THE]
    assert state.allows(ord("t"))
    feed(state, "tx")
    assert state.is_complete


def test_a_required_call_keeps_the_text_from_ending():
    state = begin_calls('root ::= "t" "x"', is_required=True)
    feed(state, "some ")
    assert not state.is_complete
    assert not state.allows(END)
    assert not state.mask()[END]
    feed(state, "tx")
    assert state.allows(END)


def test_a_call_that_is_not_required_need_not_come():
    state = begin_calls('root ::= "t" "x"', is_required=False)
    feed(state, "some")
    assert state.allows(END)

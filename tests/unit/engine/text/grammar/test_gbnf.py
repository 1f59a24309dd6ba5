import pytest

from engine.errors import BadGrammar
from engine.text.grammar.gbnf import MAX_CHARS, parse_gbnf
from engine.text.grammar.nodes import Chars, Literal, Repeat, TokenIs
from tests.unit.engine.text.grammar.spelling import TOOL, SpellingTokenizer

VOCAB = SpellingTokenizer()


def find(text: str) -> int | None:
    token_ids = VOCAB.encode(text, add_special=False, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 else None


def parse(text: str):
    return parse_gbnf(text, vocab_size=VOCAB.vocab_size, find_token=find)


def root(body: str):
    (items,) = parse(f"root ::= {body}").rules["root"].alternatives
    return items


@pytest.mark.parametrize(
    ("body", "items"),
    [
        ('"a\\n\\x41\\u00e9\\U0001F600"', (Literal("a\nAé😀"),)),
        ("[a-c]", (Chars(((97, 99),)),)),
        ("[a\\-\\]]", (Chars(((45, 45), (93, 93), (97, 97))),)),
        # A minus at the end stands for itself.
        ("[a-]", (Chars(((45, 45), (97, 97))),)),
        ("[^\\x00-\\x7F]", (Chars(((0x80, 0xD7FF), (0xE000, 0x10FFFF))),)),
        ('"" [] "b"', (Literal("b"),)),
        ('"b" # why', (Literal("b"),)),
        ('"b"{2}', (Repeat(Literal("b"), 2, 2),)),
        ('"b"{,3}', None),
        ('"b"{2,}', (Repeat(Literal("b"), 2, None),)),
        ('"b"{2,9999}', (Repeat(Literal("b"), 2, None),)),
        ('"b"{0}', ()),
        ('"b"*+', (Repeat(Repeat(Literal("b"), 0, None), 1, None),)),
        ("<[7]>", (TokenIs(7),)),
        ("<|tool|> !<[3]>", (TokenIs(TOOL), TokenIs(3, is_negated=True))),
    ],
)
def test_bodies(body: str, items: tuple[object, ...] | None):
    if items is None:
        with pytest.raises(BadGrammar):
            parse(f"root ::= {body}")
    else:
        assert root(body) == items


def test_tokens_are_found_by_their_text():
    tokenizer_text = "<|tool|>"
    assert find(tokenizer_text) == TOOL
    assert root("<|tool|>") == (TokenIs(TOOL),)
    assert root("!<|tool|>") == (TokenIs(TOOL, is_negated=True),)


def test_rules_go_on_over_lines_behind_an_operator_and_in_groups():
    grammar = parse('root ::= a |\n  (b\n  b)\na ::= "a"\r\nb ::=\n"b"\n')
    assert set(grammar.rules) == {"root", "a", "b"}
    assert grammar.lines == {"root": 1, "a": 4, "b": 5}


def test_a_second_definition_replaces_the_first():
    assert parse('root ::= a\na ::= "x"\na ::= "y"').rules["a"].alternatives == ((Literal("y"),),)


REFUSED = [
    ("", 1, "no rule 'root'"),
    ('main ::= "a"', 1, "no rule 'root'"),
    ('root ::= "a', 1, "unexpected end"),
    ("root ::= [a", 1, "unexpected end"),
    ("root = b", 1, "expected ::="),
    ('root ::= "a"\nroot ::= missing', 2, "no rule 'missing'"),
    ('root ::= ("a"', 1, "expected )"),
    ('root ::= "a")', 1, "expected a new line"),
    ("root ::= *", 1, "nothing stands before"),
    ('root ::= ""*', 1, "nothing stands before"),
    ('root ::= "a"{0}*', 1, "nothing stands before"),
    ('root ::= "a"{x}', 1, "expected a number"),
    ('root ::= "a"{1', 1, "expected }"),
    ('root ::= "a"{3,1}', 1, "from 3 to 1"),
    ('root ::= "a"{2001}', 1, "more than 2000"),
    ('root ::= ("a"{50}){50}', 1, None),
    ('root ::= ("a"{1,50} "b"{1,50}){41}', 1, "nested repetitions"),
    ('root ::= "\\q"', 1, "unknown escape"),
    ('root ::= "\\x4"', 1, "2 hexadecimal"),
    ('root ::= "\\uD800"', 1, "U+D800"),
    ("root ::= <[99999]>", 1, "token 99999"),
    ("root ::= <nothing>", 1, "not one token"),
    ("root ::= <open", 1, "expected >"),
    ("root ::= !a", 1, "expected <"),
    ('root ::= "a"\nx ::= y\ny ::= x | "b"', 2, "begins with itself"),
    ('root ::= e root "a"\ne ::= "x"?', 1, "begins with itself"),
    ("root ::= " + "(" * 200 + '"a"' + ")" * 200, 1, "nested more than 100"),
    ('root ::= "a" ' + "#" * MAX_CHARS, 1, "more than"),
]


@pytest.mark.parametrize(("text", "line", "problem"), REFUSED)
def test_refusals_name_the_line(text: str, line: int, problem: str | None):
    if problem is None:
        parse(text)
        return
    with pytest.raises(BadGrammar) as raised:
        parse(text)
    assert raised.value.line == line
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 300

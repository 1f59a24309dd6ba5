r"""GBNF, llama.cpp's grammar notation: text to a `Grammar`.

    root  ::= greeting (", " name){0,3}   # a comment
    name  ::= [A-Z] [a-z]+ | <|unknown|> | !<[7]>

Accepts what llama.cpp accepts, and refuses what it refuses, but for what it crashes or hangs on:
nesting and size are bounded, a repetition counts upwards. Knows no matcher.

Source: llama.cpp `llama_grammar_parser`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from engine.errors import BadGrammar
from engine.text.grammar.left_recursion import refuse_left_recursion
from engine.text.grammar.nodes import (
    ANY_CHAR,
    Chars,
    Choice,
    Grammar,
    Interval,
    Item,
    Literal,
    Ref,
    Repeat,
    TokenIs,
)

# llama.cpp's bound of a repetition, and of what nested repetitions multiply to.
MAX_REPETITION = 2000
MAX_CHARS = 1 << 20
MAX_DEPTH = 100

_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_DIGITS = frozenset("0123456789")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_ESCAPES = {
    "t": "\t",
    "r": "\r",
    "n": "\n",
    "\\": "\\",
    '"': '"',
    "[": "[",
    "]": "]",
    "-": "-",
}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_UINT32_DIGITS = 10
_SHOWN_CHARS = 40

# Text of a special token, brackets included, to its id; None where it is not exactly one token.
FindToken = Callable[[str], int | None]


def parse_gbnf(text: str, *, vocab_size: int, find_token: FindToken) -> Grammar:
    """Parses a grammar.

    Args:
        text: The grammar; its start rule is "root".
        vocab_size: Token ids are below it.
        find_token: Looks up a token terminal that is given by text.

    Raises:
        BadGrammar: It cannot be parsed, names a rule or a token that there is not, recurses on the
            left, or is too large; says at which line.
    """
    if len(text) > MAX_CHARS:
        raise BadGrammar(1, f"{len(text)} characters, more than {MAX_CHARS}")
    grammar = _Parser(text, vocab_size, find_token).parse()
    refuse_left_recursion(grammar)
    return grammar


class _Parser:
    def __init__(self, text: str, vocab_size: int, find_token: FindToken) -> None:
        self._text = text
        self._at = 0
        self._vocab_size = vocab_size
        self._find_token = find_token
        self._rules: dict[str, Choice] = {}
        self._lines: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        # llama.cpp's count of named and made-up rules, which bounds repetitions of groups.
        self._num_symbols = 0
        self._depth = 0

    def parse(self) -> Grammar:
        self._skip_space(newlines=True)
        while self._at < len(self._text):
            self._parse_rule()
        for name, at in self._uses.items():
            if name not in self._rules:
                self._at = at
                self._fail(f"there is no rule {name!r}")
        if "root" not in self._rules:
            self._fail("there is no rule 'root'")
        return Grammar(self._rules, self._lines)

    def _parse_rule(self) -> None:
        begin = self._at
        name = self._parse_name()
        self._skip_space(newlines=False)
        if not self._text.startswith("::=", self._at):
            self._fail("expected ::=")
        self._at += 3
        self._skip_space(newlines=True)
        self._name_symbol(name)
        rule = self._parse_alternatives(is_nested=False)
        if self._peek() not in ("\r", "\n", ""):
            self._fail("expected a new line or the end")
        # A second definition replaces the first, as in llama.cpp.
        self._rules[name] = rule
        self._lines[name] = self._line(begin)
        self._skip_space(newlines=True)

    def _parse_alternatives(self, *, is_nested: bool) -> Choice:
        alternatives = [self._parse_sequence(is_nested=is_nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip_space(newlines=True)
            alternatives.append(self._parse_sequence(is_nested=is_nested))
        return Choice(tuple(alternatives))

    def _parse_sequence(self, *, is_nested: bool) -> tuple[Item, ...]:
        items: list[Item] = []
        # What a repetition applies to (None: nothing) and how many rules that stands for.
        last: Item | None = None
        weight = 1
        while True:
            char = self._peek()
            if char in ("*", "+", "?", "{"):
                low, high = self._parse_repetition(char, is_nested=is_nested)
                if last is None:
                    self._fail("nothing stands before the repetition")
                weight = self._weigh(weight, low, high)
                items.pop()
                last = None if high == 0 else Repeat(last, low, high)
            else:
                found = self._parse_item(char)
                if found is None:
                    return tuple(items)
                last, weight = found
                self._skip_space(newlines=is_nested)
            if last is not None:
                items.append(last)

    def _parse_item(self, char: str) -> tuple[Item | None, int] | None:
        """Returns an item, None where it matches only the empty text, and its weight."""
        match char:
            case '"':
                return self._parse_literal(), 1
            case "[":
                return self._parse_class(), 1
            case "<" | "!":
                return self._parse_token(), 1
            case "(":
                return self._parse_group()
            case ".":
                self._at += 1
                return ANY_CHAR, 1
            case _ if char in _NAME_CHARS:
                at = self._at
                name = self._parse_name()
                self._uses.setdefault(name, at)
                self._name_symbol(name)
                return Ref(name), 1
            case _:
                return None

    def _parse_literal(self) -> Item | None:
        self._at += 1
        chars: list[str] = []
        while self._peek() != '"':
            chars.append(self._scalar(self._parse_char()))
        self._at += 1
        return Literal("".join(chars)) if chars else None

    def _scalar(self, code: int) -> str:
        """Returns a character of a literal, which no text holds where it is none."""
        if code == 0 or 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            self._fail(f"U+{code:04X} is no character of a text")
        return chr(code)

    def _parse_class(self) -> Item | None:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        intervals: list[Interval] = []
        while self._peek() != "]":
            low = high = self._parse_char()
            if self._peek() == "-" and self._peek(1) != "]":
                self._at += 1
                high = self._parse_char()
            intervals.append((low, high))
        self._at += 1
        return Chars.of(intervals, negated=is_negated) if intervals else None

    def _parse_token(self) -> Item:
        is_negated = self._peek() == "!"
        self._at += is_negated
        if self._peek() != "<":
            self._fail("expected <")
        if self._peek(1) == "[":
            return TokenIs(self._parse_token_id(), is_negated)
        end = self._text.find(">", self._at)
        if end < 0:
            self._fail("expected >")
        text = self._text[self._at : end + 1]
        token_id = self._find_token(text)
        if token_id is None:
            self._fail(f"{_shown(text)} is not one token")
        self._at = end + 1
        return TokenIs(token_id, is_negated)

    def _parse_token_id(self) -> int:
        self._at += 2
        token_id = self._parse_number()
        if token_id >= self._vocab_size:
            self._fail(f"token {token_id} is not in the vocabulary of {self._vocab_size} tokens")
        if not self._text.startswith("]>", self._at):
            self._fail("expected ]>")
        self._at += 2
        return token_id

    def _parse_group(self) -> tuple[Item, int]:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        self._skip_space(newlines=True)
        before = self._num_symbols
        self._num_symbols += 1
        group = self._parse_alternatives(is_nested=True)
        if self._peek() != ")":
            self._fail("expected )")
        self._at += 1
        self._depth -= 1
        return group, self._num_symbols - before

    def _parse_repetition(self, char: str, *, is_nested: bool) -> tuple[int, int | None]:
        self._at += 1
        self._skip_space(newlines=is_nested)
        match char:
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
            case _:
                return self._parse_bounds(is_nested=is_nested)

    def _parse_bounds(self, *, is_nested: bool) -> tuple[int, int | None]:
        low = self._parse_number()
        high: int | None = low
        self._skip_space(newlines=is_nested)
        if self._peek() == ",":
            self._at += 1
            self._skip_space(newlines=is_nested)
            high = self._parse_number() if self._peek() in _DIGITS else None
            self._skip_space(newlines=is_nested)
        if self._peek() != "}":
            self._fail("expected }")
        self._at += 1
        self._skip_space(newlines=is_nested)
        if low > MAX_REPETITION:
            self._fail(f"{low} repetitions, more than {MAX_REPETITION}")
        if high is not None and high < low:
            self._fail(f"a repetition from {low} to {high}")
        # More than the bound means no bound, as in llama.cpp.
        return low, None if high is not None and high > MAX_REPETITION else high

    def _weigh(self, weight: int, low: int, high: int | None) -> int:
        """Bounds what a repetition stands for; returns the weight of the whole."""
        times = high or low or 1
        if weight * times > MAX_REPETITION:
            self._fail(f"nested repetitions come to {weight * times}, more than {MAX_REPETITION}")
        self._num_symbols += 1 if high is None else high - low
        return weight * times

    def _parse_char(self) -> int:
        char = self._peek()
        if not char:
            self._fail("unexpected end")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        if kind in _HEX_ESCAPES:
            self._at += 1
            return self._parse_hex(_HEX_ESCAPES[kind])
        if kind not in _ESCAPES:
            self._at -= 1
            self._fail("unknown escape")
        self._at += 1
        return ord(_ESCAPES[kind])

    def _parse_hex(self, num_digits: int) -> int:
        digits = self._text[self._at : self._at + num_digits]
        if len(digits) < num_digits or not _HEX_DIGITS.issuperset(digits):
            self._fail(f"expected {num_digits} hexadecimal digits")
        self._at += num_digits
        return int(digits, 16)

    def _parse_name(self) -> str:
        name = self._take(_NAME_CHARS)
        if not name:
            self._fail("expected a name")
        return name

    def _parse_number(self) -> int:
        digits = self._take(_DIGITS)
        if not digits:
            self._fail("expected a number")
        if len(digits.lstrip("0")) > _UINT32_DIGITS:
            self._fail(f"the number {_shown(digits)} is too large")
        return int(digits)

    def _take(self, chars: frozenset[str]) -> str:
        begin = self._at
        while self._peek() in chars:
            self._at += 1
        return self._text[begin : self._at]

    def _name_symbol(self, name: str) -> None:
        """Counts a name when it is seen first."""
        if name not in self._uses and name not in self._rules:
            self._num_symbols += 1

    def _skip_space(self, *, newlines: bool) -> None:
        text, end = self._text, len(self._text)
        while self._at < end:
            char = text[self._at]
            if char == "#":
                while self._at < end and text[self._at] not in "\r\n":
                    self._at += 1
            elif char in " \t" or (newlines and char in "\r\n"):
                self._at += 1
            else:
                return

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._text[at] if at < len(self._text) else ""

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1

    def _fail(self, problem: str) -> NoReturn:
        rest = self._text[self._at : self._at + _SHOWN_CHARS]
        where = f"at {_shown(rest)}" if rest else "at the end"
        raise BadGrammar(self._line(self._at), f"{problem} {where}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…")

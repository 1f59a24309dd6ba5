"""The `pattern` of a JSON string as GBNF: the simple ones, anchored at both ends.

A pattern speaks of a string's characters, the grammar of its JSON text: what JSON escapes is
matched in its escaped form, so that the text stays JSON whatever the pattern allows.

Source: llama.cpp `_pattern_to_rule`, which also decides what is too much for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from engine.text.grammar.gbnf import MAX_REPETITION
from engine.text.grammar.nodes import Chars, Interval
from engine.text.grammar.schema_rules import Rules, class_char, repetition

_MAX_DEPTH = 100
_MAX_COUNT = 2**31 - 1
_OPERATORS = frozenset("|.()[]{}*+?^$")
_REPEATS = ("*", "+", "?", "{")
_ESCAPE = re.compile(r'\\(?:[trn\\"\[\]-]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})')
_ANY_BUT_NEWLINE = Chars.of([(10, 10), (13, 13)], negated=True)
# Characters that JSON has a letter for, behind a backslash; the first two have no other form.
_LETTERS = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_BARE = Chars.of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)], negated=True)


class UnsupportedPattern(ValueError):
    """A regular expression that has no grammar here."""


class InvalidPattern(ValueError):
    """No regular expression."""


@dataclass(frozen=True)
class _Part:
    """A piece of a sequence; literals are joined with their neighbours."""

    text: str
    is_literal: bool = False

    def to_rule(self) -> str:
        return f'"{self.text}"' if self.is_literal else self.text


def pattern_rule(pattern: str, name: str, rules: Rules) -> str:
    """Returns what matches a JSON string of a pattern, and adds the rules that it needs.

    Raises:
        UnsupportedPattern: It is not anchored, or uses what GBNF has not.
        InvalidPattern: It is malformed.
    """
    if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$":
        raise UnsupportedPattern("not anchored with '^' and '$'")
    return f'"\\"" ({_PatternWriter(pattern[1:-1], name, rules).write()}) "\\""'


class _PatternWriter:
    def __init__(self, text: str, name: str, rules: Rules) -> None:
        self._text = text
        self._name = name
        self._rules = rules
        self._at = 0
        self._depth = 0
        self._repeated: dict[str, str] = {}

    def write(self) -> str:
        text = self._sequence()
        if self._depth:
            self._invalid("unbalanced parentheses")
        return text

    def _sequence(self) -> str:
        parts: list[_Part] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            match char:
                case ".":
                    self._at += 1
                    parts.append(_Part(self._rules.add("dot", _in_json(_ANY_BUT_NEWLINE))))
                case "(":
                    parts.append(_Part(self._group()))
                case ")":
                    self._at += 1
                    if not self._depth:
                        self._invalid("unbalanced parentheses")
                    self._depth -= 1
                    return _joined(parts)
                case "[":
                    parts.append(_Part(self._class()))
                case "|":
                    self._at += 1
                    parts.append(_Part("|"))
                case "*" | "+" | "?":
                    self._at += 1
                    last = self._repeatable(parts)
                    parts.append(_Part(last.to_rule() + char))
                case "{":
                    low, high = self._bounds()
                    parts.append(_Part(self._times(self._repeatable(parts), low, high)))
                case "^" | "$":
                    self._unsupported("anchor inside the pattern")
                case _:
                    parts.append(_Part(self._literal(), is_literal=True))
        return _joined(parts)

    def _group(self) -> str:
        self._at += 1
        if self._text.startswith("?", self._at):
            if not self._text.startswith("?:", self._at):
                self._unsupported("unsupported group syntax")
            self._at += 2
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._unsupported("pattern nesting too deep")
        return f"({self._sequence()})"

    def _class(self) -> str:
        begin = self._at
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        intervals: list[Interval] = []
        while not self._text.startswith("]", self._at):
            low = high = self._class_char()
            if (
                self._text.startswith("-", self._at)
                and self._text[self._at + 1 : self._at + 2] != "]"
            ):
                self._at += 1
                high = self._class_char()
            intervals.append((low, high))
        self._at += 1
        chars = Chars.of(intervals, negated=is_negated)
        if not intervals or not chars.intervals:
            self._unsupported("a character class that matches nothing")
        is_plain = chars.intersect(_BARE) == chars
        return self._text[begin : self._at] if is_plain else f"({_in_json(chars)})"

    def _class_char(self) -> int:
        if self._at >= len(self._text):
            self._invalid("unterminated character class")
        length = self._escape_length() if self._text[self._at] == "\\" else 1
        self._at += length
        return _code(self._text[self._at - length : self._at])

    def _escape_length(self) -> int:
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            self._unsupported(f"unsupported escape {self._text[self._at : self._at + 2]}")
        return len(found[0])

    def _repeatable(self, parts: list[_Part]) -> _Part:
        if not parts or parts[-1].text == "|":
            self._invalid("nothing to repeat")
        return parts.pop()

    def _bounds(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        if end < 0:
            self._unsupported("unterminated curly brackets")
        numbers = self._text[self._at + 1 : end].split(",")
        self._at = end + 1
        if len(numbers) > 2 or not all(re.fullmatch(r"[0-9]{0,10}", text) for text in numbers):
            self._unsupported("wrong values in curly brackets")
        low = int(numbers[0] or 0)
        high = int(numbers[-1]) if numbers[-1] else None
        if len(numbers) == 1 and not numbers[0]:
            self._unsupported("no value in curly brackets")
        if low > _MAX_COUNT or (high is not None and high > _MAX_COUNT):
            self._unsupported("too large a value in curly brackets")
        if low > MAX_REPETITION:
            self._invalid(f"{low} repetitions, more than {MAX_REPETITION}")
        if high is not None and high < low:
            self._invalid(f"a repetition from {low} to {high}")
        return low, high

    def _times(self, part: _Part, low: int, high: int | None) -> str:
        text = part.to_rule()
        if not part.is_literal:
            if text not in self._repeated:
                number = len(self._repeated)
                self._repeated[text] = self._rules.add(f"{self._name}-{number + 1}", text)
            text = self._repeated[text]
        return repetition(text, low, high)

    def _literal(self) -> str:
        """Takes plain characters; the last of several is left alone if an operator follows it."""
        begin = self._at
        text = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            following = self._text[self._at + 1 : self._at + 2]
            before = self._at
            if char == "\\":
                added = self._escaped(following)
            elif char in _OPERATORS:
                break
            else:
                added = _escaped_literal(char)
                self._at += 1
            if text and self._text[self._at : self._at + 1] in _REPEATS:
                # The repetition is of this character alone.
                self._at = before
                break
            text += added
        if not text:
            self._unsupported(f"unsupported character {self._text[begin]}")
        return text

    def _escaped(self, following: str) -> str:
        if not following:
            self._invalid("trailing backslash")
        if following in _OPERATORS:
            self._at += 2
            return following
        length = self._escape_length()
        self._at += length
        text = self._text[self._at - length : self._at]
        code = _code(text)
        if code == 0 or 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            self._unsupported(f"{text} is no character of a text")
        is_plain = code >= 0x20 and chr(code) not in _LETTERS
        return text if is_plain else _escaped_literal(chr(code))

    def _unsupported(self, problem: str) -> NoReturn:
        raise UnsupportedPattern(problem)

    def _invalid(self, problem: str) -> NoReturn:
        raise InvalidPattern(problem)


def _joined(parts: list[_Part]) -> str:
    texts: list[str] = []
    literal = ""
    for part in parts:
        if part.is_literal:
            literal += part.text
            continue
        if literal:
            texts.append(f'"{literal}"')
            literal = ""
        texts.append(part.text)
    if literal:
        texts.append(f'"{literal}"')
    return " ".join(texts)


def _in_json(chars: Chars) -> str:
    """Returns what matches one of the characters as JSON text holds it."""
    bare = chars.intersect(_BARE)
    parts: list[str] = []
    if bare.intervals:
        ranges = "".join(f"{class_char(low)}-{class_char(high)}" for low, high in bare.intervals)
        parts.append(f"[{ranges}]")
    letters = [
        class_char(ord(letter))
        for char, letter in _LETTERS.items()
        if chars.intersect(Chars(((ord(char), ord(char)),))).intervals
    ]
    if letters:
        parts.append(f"[\\\\] [{''.join(letters)}]")
    return " | ".join(parts)


def _escaped_literal(char: str) -> str:
    """Returns the inside of a literal that matches a character as JSON text holds it."""
    if char in _LETTERS:
        letter = _LETTERS[char]
        return "\\\\" + (f"\\{letter}" if letter in '"\\' else letter)
    return f"\\\\u{ord(char):04x}" if ord(char) < 0x20 else char


def _code(text: str) -> int:
    """Returns the code point of a character, or of a GBNF escape."""
    if len(text) == 1:
        return ord(text)
    if text[1] in "xuU":
        return int(text[2:], 16)
    return {"t": 9, "r": 13, "n": 10}.get(text[1], ord(text[1]))

r"""Regular expressions that grammars are triggered by, matched in linear time as text grows.

The notation is ECMAScript's, without look-around and back-references. Works on bytes, as the
peer's matcher does: `.` and negated classes take one byte. Knows no grammar.

Example:
    >>> search = PatternSearch(parse_pattern(r"(<tool>)\s*\{"))
    >>> search.push(b"so <tool> "), search.push(b"{")
    (None, 3)

Source: R. Cox, "Regular Expression Matching: the Virtual Machine Approach" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

MAX_PATTERN_CHARS = 4096
MAX_PROGRAM = 4000
_MAX_REPEAT = 1000
_MAX_DEPTH = 50

_DIGIT = frozenset(b"0123456789")
_WORD = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = frozenset(b" \t\n\r\f\v")
_ALL = frozenset(range(256))
_NOT_NEWLINE = _ALL - frozenset(b"\n\r")
_CLASSES = {
    "d": _DIGIT,
    "D": _ALL - _DIGIT,
    "w": _WORD,
    "W": _ALL - _WORD,
    "s": _SPACE,
    "S": _ALL - _SPACE,
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}


class PatternError(ValueError):
    """A pattern that is malformed or cannot be matched in linear time."""


@dataclass(frozen=True)
class _Byte:
    values: frozenset[int]


@dataclass(frozen=True)
class _Split:
    """Goes on at `first`, and if that fails at `second`."""

    first: int
    second: int


@dataclass(frozen=True)
class _Save:
    slot: int


@dataclass(frozen=True)
class _Assert:
    kind: str


@dataclass(frozen=True)
class _Match:
    pass


_Op = _Byte | _Split | _Save | _Assert | _Match
# The program of a piece whose targets count from its own beginning.
_Code = tuple[_Op, ...]


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern; `num_groups` counts the groups that capture."""

    program: _Code
    num_groups: int


def escape(text: str) -> str:
    """Returns the pattern that matches a text."""
    return "".join("\\" + char if char in r"\^$.|?*+()[]{}-/" else char for char in text)


def parse_pattern(text: str) -> Pattern:
    """Compiles a pattern.

    Raises:
        PatternError: It is malformed, too large, or needs look-around or back-references.
    """
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"{len(text)} characters, more than {MAX_PATTERN_CHARS}")
    return _PatternParser(text).parse()


class _PatternParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._num_groups = 0
        self._depth = 0

    def parse(self) -> Pattern:
        code = self._choice()
        if self._at < len(self._text):
            self._fail("unbalanced )")
        return Pattern(_sized((*code, _Match())), self._num_groups)

    def _choice(self) -> _Code:
        code = self._sequence()
        while self._take("|"):
            other = self._sequence()
            size = len(code)
            code = (
                _Split(1, size + 2),
                *_moved(code, 1),
                _jump(size + 2 + len(other)),
                *_moved(other, size + 2),
            )
        return _sized(code)

    def _sequence(self) -> _Code:
        code: list[_Op] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            atom = self._repeated(self._atom())
            code += _moved(atom, len(code))
            _sized(code)
        return tuple(code)

    def _atom(self) -> _Code:
        char = self._text[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return (_Byte(self._class()),)
            case ".":
                return (_Byte(_NOT_NEWLINE),)
            case "^" | "$":
                return (_Assert(char),)
            case "\\":
                return self._escaped()
            case "*" | "+" | "?" | "{":
                self._fail(f"nothing to repeat before {char}")
            case _:
                return tuple(_Byte(frozenset((value,))) for value in char.encode())

    def _group(self) -> _Code:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"groups are nested more than {_MAX_DEPTH} deep")
        captures = not self._take("?:")
        if captures and self._peek() == "?":
            self._fail("look-around is not supported")
        group = self._num_groups
        self._num_groups += captures
        code = self._choice()
        if not self._take(")"):
            self._fail("missing )")
        self._depth -= 1
        if not captures:
            return code
        return (_Save(2 * group), *_moved(code, 1), _Save(2 * group + 1))

    def _escaped(self) -> _Code:
        kind = self._peek()
        if kind and kind in "bB":
            self._at += 1
            return (_Assert(kind),)
        if kind and kind in "123456789":
            self._fail("back-references are not supported")
        return (_Byte(self._escape()),) if kind in _CLASSES else self._escaped_char()

    def _escaped_char(self) -> _Code:
        return tuple(_Byte(frozenset((value,))) for value in self._char_escape().encode())

    def _escape(self) -> frozenset[int]:
        """Returns the bytes of an escape inside or outside a class."""
        kind = self._peek()
        if kind in _CLASSES:
            self._at += 1
            return _CLASSES[kind]
        return frozenset((self._class_byte(self._char_escape()),))

    def _char_escape(self) -> str:
        kind = self._peek()
        if not kind:
            self._fail("ends in a backslash")
        self._at += 1
        if kind in _CONTROLS:
            return chr(_CONTROLS[kind])
        if kind in "xu":
            return self._hex(2 if kind == "x" else 4)
        if kind.isascii() and kind.isalnum():
            self._fail(f"unknown escape \\{kind}")
        return kind

    def _hex(self, num_digits: int) -> str:
        digits = self._text[self._at : self._at + num_digits]
        try:
            code = int(digits, 16) if len(digits) == num_digits else -1
        except ValueError:
            code = -1
        if code < 0 or 0xD800 <= code <= 0xDFFF:
            self._fail(f"expected {num_digits} hexadecimal digits of a character")
        self._at += num_digits
        return chr(code)

    def _class(self) -> frozenset[int]:
        is_negated = self._take("^")
        values: set[int] = set()
        while not self._take("]"):
            low = self._class_part()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_part()
                if len(low) > 1 or len(high) > 1 or min(low) > min(high):
                    self._fail("a range that is no range")
                values |= set(range(min(low), min(high) + 1))
            else:
                values |= low
        return _ALL - values if is_negated else frozenset(values)

    def _class_part(self) -> frozenset[int]:
        char = self._peek()
        if not char:
            self._fail("missing ]")
        self._at += 1
        if char == "\\":
            if self._peek() == "b":
                self._at += 1
                return frozenset((8,))
            return self._escape()
        return frozenset((self._class_byte(char),))

    def _class_byte(self, char: str) -> int:
        if not char.isascii():
            self._fail("a class of other than ASCII characters is not supported")
        return ord(char)

    def _repeated(self, code: _Code) -> _Code:
        while True:
            bounds = self._bounds()
            if bounds is None:
                return code
            if len(code) == 1 and isinstance(code[0], _Assert):
                self._fail("nothing to repeat")
            code = _repeat(code, *bounds, is_lazy=self._take("?"))
            _sized(code)

    def _bounds(self) -> tuple[int, int | None] | None:
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                return bounds
        if not self._take("{"):
            return None
        low = self._number()
        high: int | None = low
        if self._take(","):
            high = None if self._peek() == "}" else self._number()
        if not self._take("}") or (high is not None and high < low):
            self._fail("malformed repetition")
        return low, high

    def _number(self) -> int:
        begin = self._at
        while self._peek() and self._peek() in "0123456789":
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits or len(digits) > 4 or int(digits) > _MAX_REPEAT:
            self._fail(f"expected a count of at most {_MAX_REPEAT}")
        return int(digits)

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _fail(self, problem: str) -> NoReturn:
        raise PatternError(f"{problem} at character {self._at}")


def _jump(target: int) -> _Split:
    return _Split(target, target)


def _moved(code: _Code, by: int) -> _Code:
    return tuple(
        _Split(op.first + by, op.second + by) if isinstance(op, _Split) else op for op in code
    )


def _fork(code_at: int, past: int, *, is_lazy: bool) -> _Split:
    return _Split(past, code_at) if is_lazy else _Split(code_at, past)


def _repeat(code: _Code, low: int, high: int | None, *, is_lazy: bool) -> _Code:
    size = len(code)
    times = low if high is None else high
    _sized(range((times + 1) * (size + 2)))
    result: list[_Op] = []
    for _ in range(low):
        result += _moved(code, len(result))
    if high is None:
        begin = len(result)
        result.append(_fork(begin + 1, begin + size + 2, is_lazy=is_lazy))
        result += _moved(code, begin + 1)
        result.append(_jump(begin))
        return tuple(result)
    end = len(result) + (high - low) * (size + 1)
    for _ in range(high - low):
        begin = len(result)
        result.append(_fork(begin + 1, end, is_lazy=is_lazy))
        result += _moved(code, begin + 1)
    return tuple(result)


def _sized(code: _Code | list[_Op] | range) -> _Code:
    if len(code) > MAX_PROGRAM:
        raise PatternError(f"comes to more than {MAX_PROGRAM} steps")
    return () if isinstance(code, range) else tuple(code)


@dataclass(frozen=True)
class _Thread:
    """A place in the program, where the match began, and the groups' ends (-1: unset)."""

    at: int
    start: int
    groups: tuple[int, ...]


class PatternSearch:
    """Looks for one pattern in a text that arrives in pieces, by all ways through it at once."""

    def __init__(self, pattern: Pattern) -> None:
        self._program = pattern.program
        self._no_groups = (-1,) * (2 * pattern.num_groups)
        # Threads that wait for a byte, best first; places between bytes are not resolved yet.
        self._threads: list[_Thread] = []
        self._found: _Thread | None = None
        self._position = 0
        self._last = -1

    def push(self, piece: bytes) -> int | None:
        """Adds a piece.

        Returns:
            Where the grammar's text begins, once the text up to here holds a match: at the first
            group that is not empty, else at the match.
        """
        for value in piece:
            self._step(value)
        # At the end of what there is, assertions of the end hold for now.
        found = self._at_end()
        return None if found is None else _beginning(found)

    def _step(self, value: int) -> None:
        ready: list[_Thread] = []
        seen: set[int] = set()
        for thread in self._sources():
            if self._follow(thread, value, ready, seen):
                break
        self._threads = [
            _Thread(thread.at + 1, thread.start, thread.groups)
            for thread in ready
            if value in self._values(thread.at)
        ]
        self._position += 1
        self._last = value

    def _at_end(self) -> _Thread | None:
        seen: set[int] = set()
        before = self._found
        for thread in self._sources():
            if self._follow(thread, -1, [], seen):
                break
        found, self._found = self._found, before
        return found

    def _sources(self) -> list[_Thread]:
        """The threads between bytes, and one that begins here unless a match was found."""
        if self._found is not None:
            return self._threads
        return [*self._threads, _Thread(0, self._position, self._no_groups)]

    def _follow(
        self, thread: _Thread, following: int, ready: list[_Thread], seen: set[int]
    ) -> bool:
        """Goes on without a byte, into `ready`; True if that found a match, which ends worse ways.

        `following` is the next byte, -1 at the end.
        """
        pending = [thread]
        while pending:
            now = pending.pop()
            if now.at in seen:
                continue
            seen.add(now.at)
            match self._program[now.at]:
                case _Byte():
                    ready.append(now)
                case _Split(first, second):
                    pending.append(_Thread(second, now.start, now.groups))
                    pending.append(_Thread(first, now.start, now.groups))
                case _Save(slot):
                    groups = (*now.groups[:slot], self._position, *now.groups[slot + 1 :])
                    pending.append(_Thread(now.at + 1, now.start, groups))
                case _Assert(kind):
                    if self._holds(kind, following):
                        pending.append(_Thread(now.at + 1, now.start, now.groups))
                case _Match():
                    self._found = now
                    return True
        return False

    def _holds(self, kind: str, following: int) -> bool:
        if kind == "^":
            return self._position == 0
        if kind == "$":
            return following < 0
        is_edge = (self._last in _WORD) != (following in _WORD)
        return is_edge if kind == "b" else not is_edge

    def _values(self, at: int) -> frozenset[int]:
        op = self._program[at]
        assert isinstance(op, _Byte)
        return op.values


def _beginning(found: _Thread) -> int:
    for begin, end in zip(found.groups[::2], found.groups[1::2], strict=True):
        if end > begin >= 0:
            return begin
    return found.start

"""The command line: one row per flag, and the reading of argv, environment and config.ini by it.

Precedence is command line, then variable, then file, then default. The rows are data and live in
`service.flag_table`; what the values mean is `service.options`' business. Nothing outside the
table reads a variable of the environment.

Example:
    >>> parse(["--port", "9000"], {}, FLAGS)["port"]
    9000
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any

from service.flag_values import BadValue, Kind

# How like a known flag a word must be for that to have been meant.
_NEAR = 0.7
_SECTIONS = frozenset({"", "*", "default"})


class Verdict(Enum):
    """What a flag does here."""

    HONOUR = "honour"
    IGNORE = "ignore"
    REFUSE = "refuse"


class Scope(Enum):
    """Which half of the server a flag speaks to."""

    BOTH = "both"
    SERVICE = "service"
    GATEWAY = "gateway"


class FlagError(Exception):
    """A command line that cannot be honoured; the message is for the person who typed it."""


@dataclass(frozen=True)
class Flag:
    """One row of the table.

    Attributes:
        names: spellings, the one that help shows last; empty for a variable without a flag.
        kind: how the value is read.
        dest: the key of the value in the result.
        help: one line.
        off_names: spellings that say False, for switches.
        default: the value when nothing is said.
        verdict: see `Verdict`.
        note: why it is ignored, or what to use instead of a refused one.
        variable: the peer's environment variable.
        neutral: values of a flag that is not honoured which change nothing and so are accepted.
        repeats: values add up to a tuple; otherwise the last one counts.
        scope: see `Scope`.
        group: heading in help.
        is_secret: the value is never shown.
    """

    names: tuple[str, ...]
    kind: Kind
    dest: str
    help: str = ""
    off_names: tuple[str, ...] = ()
    default: Any = None
    verdict: Verdict = Verdict.HONOUR
    note: str = ""
    variable: str | None = None
    neutral: tuple[Any, ...] = ()
    repeats: bool = False
    scope: Scope = Scope.BOTH
    group: str = ""
    is_secret: bool = False

    @property
    def environment(self) -> str | None:
        """The variable that this row reads: the peer's, or `KVARTS_<NAME>` where it has none."""
        if self.variable or self.verdict is not Verdict.HONOUR or not self.names:
            return self.variable
        longest = max(self.names, key=len)
        return "KVARTS_" + longest.lstrip("-").replace("-", "_").upper()


@dataclass(frozen=True)
class Parsed:
    """The value of every row by `dest`, and which of them somebody set."""

    values: Mapping[str, Any]
    given: frozenset[str] = field(default_factory=frozenset[str])

    def __getitem__(self, dest: str) -> Any:
        return self.values[dest]


@dataclass(frozen=True)
class _Setting:
    """One value with where it came from, for messages."""

    flag: Flag
    value: Any
    source: str


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    flags: Sequence[Flag],
    *,
    config_files: Iterable[str] = (),
) -> Parsed:
    """Reads a command line.

    Args:
        argv: the words after the program's name.
        environ: the environment.
        flags: the table.
        config_files: text of llama.cpp `config.ini` files, weakest first.

    Raises:
        FlagError: unknown flag, missing or bad value, or a flag that is refused.
    """
    values: dict[str, Any] = {flag.dest: flag.default for flag in flags}
    given: set[str] = set()
    layers = [list(_from_config(text, flags)) for text in config_files]
    layers += [list(_from_environment(environ, flags)), list(_from_argv(argv, flags))]
    for layer in layers:
        collected: dict[str, list[Any]] = {}
        for setting in layer:
            _check_verdict(setting)
            if setting.flag.verdict is not Verdict.HONOUR:
                continue
            collected.setdefault(setting.flag.dest, []).append(setting.value)
            given.add(setting.flag.dest)
        repeating = {flag.dest for flag in flags if flag.repeats}
        for dest, found in collected.items():
            values[dest] = tuple(found) if dest in repeating else found[-1]
    return Parsed(values, frozenset(given))


def wants(argv: Sequence[str], names: Sequence[str]) -> bool:
    """Says whether one of the names stands on the command line (for --help and --version)."""
    return any(_normal(word) in names for word in argv)


def _normal(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


def _from_argv(argv: Sequence[str], flags: Sequence[Flag]) -> Iterator[_Setting]:
    by_name = {name: (flag, True) for flag in flags for name in flag.names}
    by_name |= {name: (flag, False) for flag in flags for name in flag.off_names}
    words = iter(argv)
    for word in words:
        name = _normal(word)
        if name not in by_name:
            raise FlagError(_unknown(word, by_name))
        flag, is_on = by_name[name]
        if not flag.kind.takes_value:
            yield _Setting(flag, is_on, name)
            continue
        text = next(words, None)
        if text is None:
            raise FlagError(f"{name}: expected a value {flag.kind.metavar}")
        yield _Setting(flag, _read(flag, text, name), name)


def _unknown(word: str, known: Mapping[str, object]) -> str:
    name, equals, _ = word.partition("=")
    if equals and _normal(name) in known:
        return f"unknown flag {name}=...: write the value as its own word, {name} VALUE"
    if not word.startswith("-"):
        return f"{word[:80]!r} is no flag, and belongs to none (--help lists all)"
    near = get_close_matches(_normal(name), known, 1, _NEAR)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown flag {word}{hint} (--help lists all)"


def _from_environment(environ: Mapping[str, str], flags: Sequence[Flag]) -> Iterator[_Setting]:
    for flag in flags:
        name = flag.environment
        if name is None:
            continue
        negated = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
        if flag.off_names and negated != name and negated in environ:
            yield _Setting(flag, False, negated)
            continue
        text = environ.get(name, "").strip()
        if not text:
            continue
        value = _read(flag, text, name)
        # A switch without an opposite can only be switched on: the peer ignores `0` there too.
        if value is False and not flag.off_names:
            continue
        yield _Setting(flag, value, name)


def _from_config(text: str, flags: Sequence[Flag]) -> Iterator[_Setting]:
    by_key: dict[str, tuple[Flag, bool]] = {}
    for flag in flags:
        by_key |= {name.lstrip("-"): (flag, True) for name in flag.names}
        by_key |= {name.lstrip("-"): (flag, False) for name in flag.off_names}
        if flag.variable:
            by_key[flag.variable] = (flag, True)
    section = ""
    for line in text.splitlines():
        entry = line.strip()
        if entry.startswith("[") and entry.endswith("]"):
            section = entry[1:-1].strip()
            continue
        key, equals, value_text = entry.partition("=")
        key = key.strip().lstrip("-")
        # Unknown keys are another program's: the file is shared by all of llama.cpp's.
        if entry.startswith(("#", ";")) or not equals or section not in _SECTIONS:
            continue
        if key not in by_key:
            continue
        flag, is_on = by_key[key]
        value = _read(flag, value_text.strip(), f"config.ini: {key}")
        yield _Setting(flag, value if is_on else not value, f"config.ini: {key}")


def _read(flag: Flag, text: str, source: str) -> Any:
    if flag.verdict is Verdict.IGNORE:
        return text
    if flag.verdict is Verdict.REFUSE and not flag.neutral:
        return text
    try:
        return flag.kind.parse(text)
    except BadValue as bad:
        shown = "" if flag.is_secret else f" {text[:80]!r}"
        raise FlagError(f"{source}{shown}: {bad}") from None


def _check_verdict(setting: _Setting) -> None:
    flag = setting.flag
    if flag.verdict in (Verdict.HONOUR, Verdict.IGNORE) or setting.value in flag.neutral:
        return
    raise FlagError(f"{setting.source}: not supported: {flag.note or flag.help}")

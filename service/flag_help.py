"""The text of --help: what is honoured by topic, what is ignored and why, what is refused."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import cast

from service.flags import Flag, Verdict

_WIDTH = 100


def render_help(program: str, summary: str, flags: Sequence[Flag]) -> str:
    """Writes the help of a program that takes `flags`."""
    parts = [f"usage: {program} [flags]\n\n{_wrapped(summary, 0)}"]
    honoured = [flag for flag in flags if flag.verdict is Verdict.HONOUR and flag.names]
    for group in dict.fromkeys(flag.group for flag in honoured):
        rows = [_row(flag) for flag in honoured if flag.group == group]
        parts.append(f"{group}:\n" + "\n".join(rows))
    parts.append("Ignored, because answers cannot depend on them:\n" + _notes(flags, "ignore"))
    parts.append("Refused:\n" + _notes(flags, "refuse"))
    variables = [flag for flag in flags if not flag.names]
    rows = [f"  {flag.environment}\n{_wrapped(flag.help, 8)}" for flag in variables]
    parts.append("Variables without a flag:\n" + "\n".join(rows))
    parts.append(
        _wrapped(
            "-h, --help and --version print and end. Every flag takes its value as the next word. The "
            "command line wins over a variable, a variable over llama.cpp's config.ini "
            "(~/.config/llama.cpp/config.ini, behind it /etc/llama.cpp/config.ini). LLAMA_ARG_NO_X set to "
            "anything switches X off. A variable that is empty counts as not set.",
            0,
        )
    )
    return "\n\n".join(parts) + "\n"


def _row(flag: Flag) -> str:
    names = ", ".join((*flag.names, *flag.off_names))
    head = f"  {names} {flag.kind.metavar}".rstrip()
    facts = [flag.help]
    if flag.default not in (None, (), "", {}, False) and not flag.is_secret:
        facts.append(f"(default: {_shown(flag.default)})")
    if flag.environment:
        facts.append(f"[{flag.environment}]")
    return head + "\n" + _wrapped(" ".join(facts), 8)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in cast("tuple[object, ...]", value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _notes(flags: Sequence[Flag], verdict: str) -> str:
    rows = [flag for flag in flags if flag.verdict.value == verdict]
    lines: list[str] = []
    for note in dict.fromkeys(flag.note for flag in rows):
        names = [n for flag in rows if flag.note == note for n in (*flag.names, *flag.off_names)]
        lines.append(_wrapped(", ".join(names), 2))
        lines.append(_wrapped(note, 8))
    return "\n".join(lines)


def _wrapped(text: str, indent: int) -> str:
    pad = " " * indent
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=pad,
        subsequent_indent=pad,
        break_on_hyphens=False,
        break_long_words=False,
    )

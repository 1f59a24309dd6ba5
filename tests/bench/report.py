"""Figures as a table in the terminal, as a section of a Markdown page, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tests.bench.figures import HEAD, Figure, cells

BEGIN = "<!-- the table of `make bench`: begin -->"
END = "<!-- the table of `make bench`: end -->"


class ReportError(ValueError):
    """A page or a file that figures are to go to is not fit for them; the message says why."""


def as_text(figures: Sequence[Figure]) -> str:
    """A table with columns of equal width."""
    rows = [HEAD, *(cells(figure) for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def as_markdown(figures: Sequence[Figure], facts: Sequence[str]) -> str:
    """What was measured on, then the table."""
    lines = [*(f"* {fact}" for fact in facts), "", _row(HEAD), _row(["---"] * len(HEAD))]
    return "\n".join([*lines, *(_row(cells(figure)) for figure in figures)])


def write_page(page: Path, figures: Sequence[Figure], facts: Sequence[str]) -> None:
    """Replaces the table between the two marks of a page.

    Raises:
        ReportError: The page has not both marks, in order.
    """
    head, tail = split_page(page)
    page.write_text(f"{head}{BEGIN}\n{as_markdown(figures, facts)}\n{END}{tail}")


def split_page(page: Path) -> tuple[str, str]:
    """What stands before and behind the marks.

    Raises:
        ReportError: The page has not both marks, in order.
    """
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ReportError(f"{page} lacks the marks {BEGIN} and {END}")
    return head, tail


def write_json(path: Path, figures: Sequence[Figure], facts: Sequence[str]) -> None:
    """Writes everything, unrounded."""
    content = {"facts": list(facts), "figures": [figure.to_json() for figure in figures]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> list[Figure]:
    """The figures that `write_json` wrote.

    Raises:
        ReportError: The file is not one of those.
    """
    names = {field.name for field in fields(Figure)}
    try:
        entries = json.loads(path.read_text())["figures"]
        return [Figure(**{k: v for k, v in entry.items() if k in names}) for entry in entries]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ReportError(f"{path} does not hold figures of an earlier run") from error


def joined(earlier: Sequence[Figure], later: Sequence[Figure]) -> list[Figure]:
    """Both, the later in the place of an earlier one of the same name."""
    found = {(figure.measurement, figure.name): figure for figure in (*earlier, *later)}
    return list(found.values())


def _row(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"

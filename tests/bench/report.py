"""Figures as a table in the terminal, as a section of a Markdown page, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.bench.figures import HEAD, Figure, cells

BEGIN = "<!-- the table of `make bench`: begin -->"
END = "<!-- the table of `make bench`: end -->"


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
        ValueError: The page has not both marks, in order.
    """
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n{as_markdown(figures, facts)}\n{END}{tail}")


def write_json(path: Path, figures: Sequence[Figure], facts: Sequence[str]) -> None:
    """Writes everything, unrounded."""
    content = {"facts": list(facts), "figures": [figure.to_json() for figure in figures]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _row(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"

"""What the documents point at must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_REFERENCES = sorted(
    set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (_ROOT / "docs/differences.md").read_text()))
)
_LINKS = [
    (document, link)
    for document in (_ROOT / "README.md", *(_ROOT / "docs").glob("*.md"))
    for link in re.findall(r"\]\((?!http)([^)#]+)", document.read_text())
]


@pytest.mark.parametrize(("file", "test"), _REFERENCES)
def test_every_difference_has_its_test(file: str, test: str) -> None:
    source = (_ROOT / "tests" / file).read_text()
    assert f"def {test}(" in source or not test


def test_every_row_of_the_differences_names_a_test() -> None:
    rows = [
        line
        for line in (_ROOT / "docs/differences.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| Difference")
    ]
    assert len(rows) > 10
    without = [row for row in rows if ".py" not in row and not row.endswith("| the same |")]
    assert without == []


@pytest.mark.parametrize(("document", "link"), _LINKS, ids=[link for _, link in _LINKS])
def test_every_link_leads_somewhere(document: Path, link: str) -> None:
    assert (document.parent / link).exists()


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (_ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", (_ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

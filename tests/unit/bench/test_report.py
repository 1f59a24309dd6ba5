"""The table of the benchmark: what counts as met, and where it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.figures import Figure, cells
from tests.bench.report import (
    BEGIN,
    END,
    ReportError,
    as_text,
    joined,
    read_json,
    write_json,
    write_page,
)
from tests.bench.served_speed import common_rate, first_wait_ms

FAST = Figure("engine", "decode", "tokens/s", ours=150.4, peer=100.0, bar=1.5)
SLOW = Figure("engine", "prefill", "tokens/s", ours=149.0, peer=100.0, bar=1.5)
LATE = Figure("start", "ready", "s", 3.2, bar=3.0, is_ratio=False, is_at_most=True)


def test_a_bar_is_judged_by_the_ratio_or_by_the_figure_itself() -> None:
    assert FAST.is_met
    assert SLOW.is_met is False
    assert LATE.is_met is False
    assert Figure("served", "share", "ratio", 0.9, bar=0.9, is_ratio=False).is_met


def test_without_a_peer_or_a_bar_nothing_is_judged() -> None:
    assert Figure("engine", "decode", "tokens/s", 150.0, bar=1.5).is_met is None
    assert Figure("engine", "decode", "tokens/s", 150.0, 100.0).is_met is None


def test_cells_show_what_was_missed() -> None:
    assert cells(SLOW) == ("prefill", "tokens/s", "149", "100", "1.49", ">= 1.5", "NO")
    assert cells(LATE) == ("ready", "s", "3.2", "", "", "<= 3", "NO")


def test_the_columns_of_the_terminal_line_up() -> None:
    lines = as_text([FAST, LATE]).splitlines()
    assert lines[0].index("unit") == lines[2].index("tokens/s") == lines[3].index("s", 6)


def test_a_page_keeps_all_but_what_is_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, [FAST], ["a machine"])
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n* a machine\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| decode | tokens/s | 150 | 100 | 1.50 | >= 1.5 | yes |" in text


def test_a_page_without_marks_is_refused_and_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ReportError, match="lacks the marks"):
        write_page(page, [FAST], [])
    assert page.read_text() == "nothing\n"


def test_json_is_unrounded_and_says_what_was_met(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, [FAST], ["a machine"])
    content = json.loads(path.read_text())
    assert content["facts"] == ["a machine"]
    assert content["figures"][0]["ours"] == 150.4
    assert content["figures"][0]["is_met"] is True


def test_the_common_rate_counts_only_while_all_streams_decode() -> None:
    first = {"sent_s": 0.0, "tokens_s": [1.0, 2.0, 3.0, 4.0]}
    second = {"sent_s": 0.5, "tokens_s": [2.0, 3.0, 4.0, 5.0]}
    # From 2 to 4 s both streams send two tokens more.
    assert common_rate([first, second]) == 2.0
    assert first_wait_ms([first, second]) == 1250.0


def test_later_figures_stand_in_the_place_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, [FAST, LATE], [])
    again = Figure("engine", "decode", "tokens/s", ours=99.0, peer=100.0, bar=1.5)
    assert joined(read_json(path), [again, SLOW]) == [again, LATE, SLOW]


@pytest.mark.parametrize("text", ["", "[]", '{"figures": [{"name": "x"}]}', "{"])
def test_a_file_that_holds_no_figures_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"figures\.json does not hold"):
        read_json(path)

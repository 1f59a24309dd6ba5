"""Memory that can be had: the least of what machine and control group leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.memory.available import available_bytes


@pytest.fixture(name="meminfo")
def make_meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n")
    return path


def group(folder: Path, limit: str, current: int, inactive: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nslab 7\n")
    return folder


def test_without_a_group_the_machine_counts(tmp_path: Path, meminfo: Path) -> None:
    assert available_bytes(meminfo, tmp_path / "none") == 4000 << 10
    assert available_bytes(meminfo, group(tmp_path, "max", 1, 0)) == 4000 << 10


def test_the_smaller_of_both_counts(tmp_path: Path, meminfo: Path) -> None:
    assert available_bytes(meminfo, group(tmp_path, "1000000", 700_000, 50_000)) == 350_000
    assert available_bytes(meminfo, group(tmp_path, "1000000", 2_000_000, 0)) == 0
    assert available_bytes(meminfo, group(tmp_path, str(1 << 40), 0, 0)) == 4000 << 10


def test_nobody_tells(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path) is None

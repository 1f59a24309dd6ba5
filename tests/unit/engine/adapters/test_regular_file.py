"""Files that change while they are read, and what is no file: errors, and no signal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.adapters.errors import AdapterFileInvalid
from engine.adapters.regular_file import RegularFile


def test_ranges(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(200)))
    with RegularFile(path, "a") as file:
        assert file.size == 200
        assert file.read(3, 4).tolist() == [3, 4, 5, 6]
        assert file.read(200, 0).size == 0
        first = file.read(0, 4)
        first[:] = 9
        assert file.read(0, 4).tolist() == [0, 1, 2, 3]


def test_one_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    """A mapping of it would end the process with SIGBUS."""
    path = tmp_path / "a"
    path.write_bytes(bytes(100_000))
    with RegularFile(path, "a") as file:
        os.truncate(path, 50_000)
        with pytest.raises(AdapterFileInvalid, match="a: was cut short while it was read"):
            file.read(0, file.size)


@pytest.mark.parametrize("what", ["fifo", "folder", "device", "gone"])
def test_what_is_no_file(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path = Path("/dev/zero")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AdapterFileInvalid, match=r"not a regular file|cannot be read"):
        RegularFile(path, "a")
    assert len(os.listdir("/proc/self/fd")) == before

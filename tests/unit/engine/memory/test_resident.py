"""What the process takes, as the system tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.memory.resident import resident_bytes


def test_it_is_the_line_of_the_status(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nRssAnon:\t 512 kB\n")
    assert resident_bytes(status) == 1 << 20


@pytest.mark.parametrize("text", [None, "", "Name:\tpython\n"])
def test_nobody_tells(tmp_path: Path, text: str | None) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text)
    assert resident_bytes(status) == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_it_grows_with_what_is_written() -> None:
    before = resident_bytes()
    written = np.ones(64 << 20, np.uint8)
    assert resident_bytes() - before > written.nbytes // 2

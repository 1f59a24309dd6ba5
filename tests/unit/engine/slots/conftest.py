"""An empty folder of slot files for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.slots.folder import SlotFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir()
    return path


@pytest.fixture
def folder(root: Path) -> SlotFolder:
    return SlotFolder(str(root))

"""Many saves: within their limit, on disk as they are listed, and nothing left open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.slots.errors import DiskFull
from engine.slots.folder import SlotFolder
from engine.slots.manifest import file_bytes
from engine.slots.writer import SlotWriter
from tests.unit.engine.slots.saved import NAME, State, files_in, make_state, read_state

_OLD, _NEW = make_state(40, seed=1), make_state(300, seed=2)


def test_many_saves_leave_no_descriptor_and_no_file(root: Path, folder: SlotFolder):
    _OLD.write(folder)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(200):
        _OLD.write(folder, f"slot-{index % 4}")
        read_state(folder, f"slot-{index % 4}")
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(files_in(root)) == {NAME, *(f"slot-{i}" for i in range(4))}


def _on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_thousand_saves_stay_within_their_limit(root: Path):
    """Check 9: of all tenants together, while they are written too."""
    limit = 200_000
    tenants = [SlotFolder(str(root), tenant, limit) for tenant in ("", "0a")]
    states = [make_state(length, seed=length) for length in (40, 300, 700)]
    seen: list[int] = []
    refused = saved = 0

    def watch(state: State, folder: SlotFolder, name: str) -> int:
        with SlotWriter.open(folder, name, state.manifest, state.tokens) as writer:
            seen.append(_on_disk(root))
            for piece in state.manifest.pieces:
                writer.add(piece, state.contents[piece])
            size_bytes = writer.publish()
        seen.append(_on_disk(root))
        return size_bytes

    for index in range(1000):
        folder, state = tenants[index % 2], states[index * 7 % 3]
        name = f"slot-{index * 13 % 11}"
        before = files_in(root)
        try:
            assert watch(state, folder, name) == Path(_place(folder, name)).stat().st_size
            saved += 1
        except DiskFull:
            refused += 1
            assert files_in(root) == before
            for file in folder.list()[:1]:
                folder.delete(file.filename)
    assert saved > 100
    assert refused > 100
    assert max(seen) <= limit
    for folder in tenants:
        listed = {file.filename: file.size_bytes for file in folder.list()}
        place = Path(_place(folder, "x")).parent
        assert listed == {path.name: path.stat().st_size for path in place.glob("slot-*")}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in place.glob("slot-*"))
    assert stat.S_IMODE((root / ".tenant-0a").stat().st_mode) == 0o700


def _place(folder: SlotFolder, name: str) -> str:
    inside = f".tenant-{folder.tenant}" if folder.tenant else ""
    return str(Path(folder.root, inside, name))


def test_room_that_is_promised_to_one_save_is_no_others(root: Path):
    size_bytes = file_bytes(_OLD.manifest)
    folder = SlotFolder(str(root), limit_bytes=2 * size_bytes - 1)
    with SlotWriter.open(folder, "a", _OLD.manifest, _OLD.tokens) as writer:
        with pytest.raises(DiskFull, match="'b'"):
            _OLD.write(folder, "b")
        for piece in _OLD.manifest.pieces:
            writer.add(piece, _OLD.contents[piece])
        assert writer.publish() == size_bytes
    assert read_state(folder, "a")[0] == tuple(_OLD.tokens)

"""The folder of slot files: nothing outside it is touched, and what the dead left is swept."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, InvalidField
from engine.slots.errors import SlotFileCorrupt, SlotFileNotFound, SlotIo
from engine.slots.folder import SlotFolder, own_name
from tests.unit.engine.slots.saved import NAME, files_in, make_state, read_state

_OLD, _NEW = make_state(40, seed=1), make_state(300, seed=2)


BAD_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    ".hidden",
    "end.",
    "a..b",
    "nul\0x",
    "new\nline",
    "x" * 256,
    "x" * 300,
    "%2e%2e",
    "a%00",
    "\uff0e\uff0e",
    "a b",
    "é",
    ".saving-" + "0" * 32,
    ".tenant-ab",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_before_anything_is_touched(folder: SlotFolder, name: str):
    for call in _calls(folder, name):
        with pytest.raises(InvalidField, match="filename"):
            call()
    assert files_in(Path(folder.root)) == {}


@pytest.mark.parametrize("is_newer", [True, False])
def test_of_two_saves_of_the_server_the_newer_one_stays(folder: SlotFolder, is_newer: bool):
    """An earlier version may have served in between, under the names that it knew."""
    marked = own_name(7, "c0ffee" * 11)
    _OLD.write(folder, ".autosave-7")
    _NEW.write(folder, marked)
    os.utime(Path(folder.root) / marked, ns=(0, 10))
    os.utime(Path(folder.root) / ".autosave-7", ns=(0, 20 if is_newer else 5))
    assert folder.list_unmarked() == {7: ".autosave-7"}
    folder.mark(".autosave-7", 7, "c0ffee" * 11)
    assert read_state(folder, marked)[0] == tuple((_OLD if is_newer else _NEW).tokens)
    assert folder.list_unmarked() == ({} if is_newer else {7: ".autosave-7"})


def test_a_name_of_255_bytes_is_fine(folder: SlotFolder):
    name = "x" * 255
    _OLD.write(folder, name)
    assert read_state(folder, name)[0] == tuple(_OLD.tokens)


def _calls(folder: SlotFolder, name: str) -> list[Callable[[], Any]]:
    return [
        lambda: _OLD.write(folder, name),
        lambda: read_state(folder, name),
        lambda: folder.delete(name),
    ]


def test_a_missing_file_is_named(folder: SlotFolder):
    for call in _calls(folder, "missing")[1:]:
        with pytest.raises(SlotFileNotFound, match="missing"):
            call()


def _make_odd(root: Path, outside: Path, kind: str) -> None:
    path = root / NAME
    match kind:
        case "link":
            path.symlink_to(outside)
        case "dangling":
            path.symlink_to(root / "nowhere")
        case "device":
            path.symlink_to("/dev/zero")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()


@pytest.mark.parametrize("kind", ["link", "dangling", "device", "fifo", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(root: Path, folder: SlotFolder, kind: str):
    outside = root.parent / "outside"
    _OLD.write(SlotFolder(str(root.parent)), "outside")
    before = outside.read_bytes()
    _make_odd(root, outside, kind)
    for call in _calls(folder, NAME)[1:]:
        with pytest.raises(SlotFileCorrupt, match="no regular file"):
            call()
    assert folder.list() == []
    assert outside.read_bytes() == before


def test_saving_over_a_link_replaces_the_link(root: Path, folder: SlotFolder):
    outside = root.parent / "outside"
    outside.write_text("mine")
    (root / NAME).symlink_to(outside)
    _OLD.write(folder)
    assert outside.read_text() == "mine"
    assert not (root / NAME).is_symlink()
    assert read_state(folder)[0] == tuple(_OLD.tokens)


def test_a_hard_link_of_a_saved_file_keeps_its_content(root: Path, folder: SlotFolder):
    _OLD.write(folder)
    other = root.parent / "other"
    os.link(root / NAME, other)
    before = other.read_bytes()
    _NEW.write(folder)
    assert other.read_bytes() == before


@pytest.mark.parametrize("is_brief", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_link_swapped_in_gains_nothing(root: Path, folder: SlotFolder, is_brief: bool):
    """Check 6: a file and a link to a foreign one take turns under one name while it is read."""
    secret = root.parent / "secret"
    _NEW.write(SlotFolder(str(root.parent)), "secret")
    before = secret.read_bytes()
    _OLD.write(folder)
    os.rename(root / NAME, root / "whole")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.link(root / "whole", root / "next")
            os.rename(root / "next", root / NAME)
            os.unlink(root / NAME)
            os.symlink(secret, root / "next")
            os.rename(root / "next", root / NAME)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set[str]()
    try:
        for _ in range(10_000):
            if is_brief and {"read", "SlotFileCorrupt"} <= seen:
                break
            try:
                tokens, _ = read_state(folder)
            except EngineError as error:
                seen.add(type(error).__name__)
                continue
            seen.add("read")
            assert tokens == tuple(_OLD.tokens)
    finally:
        stop.set()
        swapper.join()
    assert "read" in seen
    assert "SlotFileCorrupt" in seen
    assert secret.read_bytes() == before


def test_files_are_private_and_listed_by_name(root: Path, folder: SlotFolder):
    for name in ("b", "a", "B"):
        _OLD.write(folder, name)
    (root / ".other").write_text("")
    (root / "bad name").write_text("")
    (root / "sub").mkdir()
    assert [file.filename for file in folder.list()] == ["B", "a", "b"]
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o600
    assert folder.list()[0].size_bytes == (root / "B").stat().st_size
    assert folder.delete("a") == (root / "b").stat().st_size
    assert [file.filename for file in folder.list()] == ["B", "b"]


def test_tenants_do_not_see_each_other(root: Path):
    one, two = SlotFolder(str(root), "0a"), SlotFolder(str(root), "0b")
    assert one.list() == []
    with pytest.raises(SlotFileNotFound):
        read_state(one)
    _OLD.write(one)
    assert two.list() == SlotFolder(str(root)).list() == []
    with pytest.raises(SlotFileNotFound):
        two.delete(NAME)
    assert stat.S_IMODE((root / ".tenant-0a").stat().st_mode) == 0o700
    assert read_state(one)[0] == tuple(_OLD.tokens)


def test_a_tenants_folder_that_is_a_link_is_not_followed(root: Path):
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (root / ".tenant-0a").symlink_to(elsewhere)
    with pytest.raises(SlotIo):
        _OLD.write(SlotFolder(str(root), "0a"))
    assert files_in(elsewhere) == {}


def test_a_sweep_leaves_what_somebody_still_writes(root: Path, folder: SlotFolder):
    with folder.create(NAME) as temporary:
        (name,) = files_in(root)
        assert name.startswith(".saving-")
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o600
        assert folder.sweep() == 0
        with folder.create(NAME) as other:
            assert len(files_in(root)) == 2
            other.publish(NAME)
        temporary.publish(NAME)
    assert list(files_in(root)) == [NAME]


def test_a_sweep_cleans_every_tenants_folder_and_nothing_else(root: Path, folder: SlotFolder):
    tenant = SlotFolder(str(root), "0a")
    _OLD.write(tenant)
    _OLD.write(folder)
    left = f".saving-{'0' * 32}"
    for place in (root, root / ".tenant-0a"):
        (place / left).write_text("")
        (place / ".saving-mine").write_text("")
    os.mkfifo(root / f".saving-{'1' * 32}")
    assert folder.sweep() == 3
    assert set(files_in(root)) == {
        NAME,
        ".saving-mine",
        ".tenant-0a",
        f".tenant-0a/{NAME}",
        ".tenant-0a/.saving-mine",
    }


def test_a_save_survives_a_sweep_between_making_and_locking(
    root: Path, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
):
    from engine.slots import folder as module

    real, swept = module.fcntl.flock, list[int]()

    def flock(descriptor: int, flags: int) -> None:
        if not swept:
            swept.append(0)
            swept[0] = folder.sweep()
        real(descriptor, flags)

    monkeypatch.setattr(module.fcntl, "flock", flock)
    _OLD.write(folder)
    assert swept == [1]
    assert list(files_in(root)) == [NAME]
    assert read_state(folder)[0] == tuple(_OLD.tokens)

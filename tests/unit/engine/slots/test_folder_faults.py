"""Failures of the system, one at a time, at every call that a save or a restore makes."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.slots.errors import DiskFull, SlotIo
from engine.slots.folder import SlotFolder
from tests.unit.engine.slots.faulty_os import FaultyOs
from tests.unit.engine.slots.saved import NAME, files_in, make_state, read_state

_OLD, _NEW = make_state(40, seed=1), make_state(300, seed=2)


def _with_faults(monkeypatch: pytest.MonkeyPatch, faulty: FaultyOs) -> None:
    monkeypatch.setattr("engine.slots.folder.os", faulty)
    monkeypatch.setattr("engine.slots.writer.os", faulty)


def _num_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    faulty = FaultyOs(0, -1, for_ever=False)
    with monkeypatch.context() as patch:
        _with_faults(patch, faulty)
        _NEW.write(SlotFolder(str(root)), "probe")
    assert faulty.calls[-3:] == ["fsync", "rename", "fsync"]
    os.unlink(root / "probe")
    return len(faulty.calls)


@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EROFS, errno.EACCES]
)
def test_every_failing_call_leaves_the_old_file(
    root: Path, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch, number: int, for_ever: bool
):
    _OLD.write(folder)
    before = files_in(root)
    count = _num_calls(root, monkeypatch)
    assert count > 10
    for at in range(count):
        faulty = FaultyOs(number, at, for_ever=for_ever)
        with monkeypatch.context() as patch:
            _with_faults(patch, faulty)
            with pytest.raises((DiskFull, SlotIo)) as caught:
                _NEW.write(folder)
        assert faulty.has_failed
        if number == errno.ENOSPC:
            assert isinstance(caught.value, DiskFull)
        else:
            assert isinstance(caught.value, SlotIo)
            assert caught.value.errno == number
        # The very last call makes the rename durable: the new file is whole by then.
        if at < count - 1:
            assert files_in(root) == before, at
    assert read_state(folder)[0] == tuple(_NEW.tokens)
    _OLD.write(folder)
    assert read_state(folder)[0] == tuple(_OLD.tokens)


@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EACCES])
def test_every_failing_call_of_a_restore_is_named(
    root: Path, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch, number: int, for_ever: bool
):
    _OLD.write(folder)
    before = files_in(root)
    descriptors = len(os.listdir("/proc/self/fd"))
    for at in itertools.count():
        faulty = FaultyOs(number, at, for_ever=for_ever)
        with monkeypatch.context() as patch:
            patch.setattr("engine.slots.folder.os", faulty)
            patch.setattr("engine.slots.reader.os", faulty)
            error = _refusal(folder)
        if error is None:
            assert at > 6
            assert not faulty.has_failed
            break
        assert faulty.has_failed
        if number == errno.ENOSPC:
            assert isinstance(error, DiskFull)
        else:
            assert isinstance(error, SlotIo)
            assert (error.filename, error.errno) == (NAME, number)
        assert files_in(root) == before
        assert read_state(folder)[0] == tuple(_OLD.tokens)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _refusal(folder: SlotFolder) -> EngineError | None:
    try:
        read_state(folder)
    except EngineError as error:
        return error
    return None


def test_a_failed_fsync_is_not_tried_again(
    root: Path, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
):
    count = _num_calls(root, monkeypatch)
    faulty = FaultyOs(errno.EIO, count - 3, for_ever=False)
    with monkeypatch.context() as patch:
        _with_faults(patch, faulty)
        with pytest.raises(SlotIo):
            _NEW.write(folder)
    assert faulty.calls.count("fsync") == 1
    assert files_in(root) == {}
    _NEW.write(folder)
    assert read_state(folder)[0] == tuple(_NEW.tokens)


def test_all_is_written_then_synced_then_named_then_the_folder_synced(
    root: Path, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
):
    """Check 3: the order of calls, and which file each of them is of."""
    calls: list[tuple[str, bool]] = []

    class Traced:
        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            if name not in ("pwrite", "fsync", "rename"):
                return real

            def call(first: Any, *args: Any, **kwargs: Any) -> Any:
                is_folder = isinstance(first, int) and stat.S_ISDIR(os.fstat(first).st_mode)
                calls.append((name, is_folder))
                return real(first, *args, **kwargs)

            return call

    monkeypatch.setattr("engine.slots.folder.os", Traced())
    monkeypatch.setattr("engine.slots.writer.os", Traced())
    _NEW.write(folder)
    *writes, synced, named, folder_synced = calls
    assert set(writes) == {("pwrite", False)}
    assert len(writes) > 4
    assert (synced, named, folder_synced) == (("fsync", False), ("rename", False), ("fsync", True))
    assert list(files_in(root)) == [NAME]


def test_short_writes_and_reads_are_gone_on_with(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
):
    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
            return os.pwrite(descriptor, data[:37], offset)

        def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            return os.preadv(descriptor, [buffers[0][:41]], offset)

    monkeypatch.setattr("engine.slots.writer.os", Short())
    monkeypatch.setattr("engine.slots.reader.os", Short())
    _OLD.write(folder)
    assert read_state(folder)[0] == tuple(_OLD.tokens)


def test_a_read_error_is_named(folder: SlotFolder, monkeypatch: pytest.MonkeyPatch):
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def preadv(self, *_: Any) -> int:
            raise OSError(errno.EIO, "broken")

    _OLD.write(folder)
    monkeypatch.setattr("engine.slots.reader.os", Broken())
    with pytest.raises(SlotIo) as caught:
        read_state(folder)
    assert (caught.value.filename, caught.value.errno) == (NAME, errno.EIO)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(root: Path, folder: SlotFolder):
    root.chmod(0o500)
    try:
        with pytest.raises(SlotIo) as caught:
            _OLD.write(folder)
    finally:
        root.chmod(0o700)
    assert caught.value.errno == errno.EACCES


def test_a_full_disk_is_named_and_leaves_the_old_file(root: Path, folder: SlotFolder):
    """The limit on a file's size stands for the disk's, which a test cannot fill."""
    _OLD.write(folder)
    before = files_in(root)
    script = """
import resource, signal, sys
from engine.slots.errors import DiskFull
from engine.slots.folder import SlotFolder
from engine.slots.manifest import file_bytes
from engine.slots.writer import SlotWriter
from tests.unit.engine.slots.faulty_os import FaultyOs
from tests.unit.engine.slots.saved import make_state
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
try:
    make_state(300, seed=2).write(SlotFolder(sys.argv[1]))
except DiskFull as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"no room for slot file '{NAME}'"
    assert files_in(root) == before

"""The folder of slot files: nothing outside it is touched, and no failure leaves a third thing."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, InvalidField
from engine.slots.errors import DiskFull, SlotFileCorrupt, SlotFileNotFound, SlotIo
from engine.slots.folder import SlotFolder
from engine.slots.manifest import file_bytes
from engine.slots.writer import SlotWriter
from tests.unit.engine.slots.saved import NAME, State, files_in, make_state, read_state

_OLD, _NEW = make_state(40, seed=1), make_state(300, seed=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir()
    return path


@pytest.fixture
def folder(root: Path) -> SlotFolder:
    return SlotFolder(str(root))


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


def test_a_link_swapped_in_gains_nothing(root: Path, folder: SlotFolder):
    """A file and a link to a foreign one take turns under one name while it is read."""
    secret = root.parent / "secret"
    _NEW.write(SlotFolder(str(root.parent)), "secret")
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
            try:
                tokens, _ = read_state(folder)
            except EngineError as error:
                seen.add(type(error).__name__)
                continue
            seen.add("read")
            assert tokens == tuple(_OLD.tokens)
            if len(seen) == 3:
                break
    finally:
        stop.set()
        swapper.join()
    assert "read" in seen
    assert "SlotFileCorrupt" in seen


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


# Failures of the system, one at a time, at every call that a save makes.

_CALLS = ("open", "pwrite", "fsync", "rename", "fstat", "preadv")


class FaultyOs:
    """The os module, of which the n-th of some calls fails: once, or from then on."""

    def __init__(self, number: int, at: int, *, for_ever: bool) -> None:
        self.number, self.at, self.for_ever = number, at, for_ever
        self.calls: list[str] = []
        self.has_failed = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            place = len(self.calls)
            self.calls.append(name)
            if place == self.at or (self.for_ever and place > self.at):
                self.has_failed = True
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **kwargs)

        return call


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


# Death in the middle of a save.

_KILLER = """
import os, signal, sys
from tests.unit.engine.slots.saved import make_state
from tests.unit.engine.slots.test_folder import FaultyOs
from engine.slots import folder, writer

class Deadly(FaultyOs):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        if name not in ("open", "pwrite", "fsync", "rename"):
            return getattr(os, name)
        def call(*args, **kwargs):
            if len(self.calls) == self.at:
                if name == "pwrite":
                    os.pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*args, **kwargs)
        return call

deadly = Deadly(0, int(sys.argv[2]), for_ever=False)
folder.os = writer.os = deadly
make_state(300, seed=2).write(folder.SlotFolder(sys.argv[1]))
"""


def test_a_kill_at_every_stage_leaves_the_old_file_or_the_new(root: Path, folder: SlotFolder):
    _OLD.write(folder)
    old = (root / NAME).read_bytes()
    _NEW.write(folder, "new")
    new = (root / "new").read_bytes()
    os.unlink(root / "new")
    outcomes: list[bytes] = []
    for at in range(100):
        done = subprocess.run([sys.executable, "-c", _KILLER, str(root), str(at)], check=False)
        outcomes.append((root / NAME).read_bytes())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        folder.sweep()
        assert set(files_in(root)) == {NAME}
    assert len(outcomes) > 8
    switch = outcomes.index(new)
    assert outcomes == [old] * switch + [new] * (len(outcomes) - switch)
    # Killed before the rename it is old, behind it new, and read_state takes it.
    assert len(outcomes) - switch == 2
    assert read_state(folder)[0] == tuple(_NEW.tokens)


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

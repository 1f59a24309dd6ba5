"""The folder between the two halves: whose it is, when it goes, and what a sweep leaves alone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from service.private_folder import SOCKET, private_folder

_ROOT = Path(__file__).parents[3]
_OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from service.private_folder import SOCKET, private_folder
with private_folder() as folder:
    (folder / SOCKET).touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The temporary folder, one of this test alone; short, since a socket's path is."""
    with tempfile.TemporaryDirectory(prefix="kp-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def abandoned(temporary: Path, pid: int, *, mode: int = 0o700) -> Path:
    folder = temporary / f"kvarts-{pid}-abcd_123"
    folder.mkdir(mode=mode)
    return folder


def sweep() -> None:
    with private_folder():
        pass


def test_it_is_of_this_user_alone_and_gone_afterwards(temporary: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / SOCKET).touch()
    assert list(temporary.iterdir()) == []


def test_a_socket_s_path_is_never_too_long(temporary: Path) -> None:
    deep = temporary / ("x" * 60)
    deep.mkdir()
    tempfile.tempdir = str(deep)
    with private_folder() as folder:
        assert len(os.fsencode(folder / SOCKET)) <= 100
        assert folder.parent != deep


def test_the_folder_of_a_killed_owner_goes_with_the_next_start(temporary: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(temporary)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        sweep()
        assert (folder / SOCKET).exists()
        owner.kill()
        owner.wait()
        assert (folder / SOCKET).exists()
        sweep()
        assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("has_socket", [False, True])
def test_an_abandoned_folder_goes(temporary: Path, gone: int, *, has_socket: bool) -> None:
    folder = abandoned(temporary, gone)
    if has_socket:
        (folder / SOCKET).touch()
    sweep()
    assert not folder.exists()


def test_a_folder_whose_owner_lives_stays(temporary: Path) -> None:
    folder = abandoned(temporary, os.getpid())
    sweep()
    assert folder.exists()


def test_a_folder_that_somebody_holds_stays(temporary: Path, gone: int) -> None:
    # As of another container, where the id means another process.
    folder = abandoned(temporary, gone)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        sweep()
        assert folder.exists()
    finally:
        os.close(descriptor)
    sweep()
    assert not folder.exists()


def test_a_folder_of_another_user_stays(
    temporary: Path, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = abandoned(temporary, gone)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    sweep()
    assert folder.exists()


def test_a_folder_that_others_may_enter_stays(temporary: Path, gone: int) -> None:
    folder = abandoned(temporary, gone, mode=0o755)
    sweep()
    assert folder.exists()


@pytest.mark.parametrize("content", ["other", f"{SOCKET}.old"])
def test_a_folder_with_something_else_in_it_stays_whole(
    temporary: Path, gone: int, content: str
) -> None:
    folder = abandoned(temporary, gone)
    for name in (SOCKET, content):
        (folder / name).touch()
    sweep()
    assert sorted(os.listdir(folder)) == sorted([SOCKET, content])


@pytest.mark.parametrize("name", ["kvarts-abcd_123", "kvarts-{}-ABCD_123", "kvarts-{}-abcd_1234"])
def test_a_folder_of_another_name_stays(temporary: Path, gone: int, name: str) -> None:
    folder = temporary / name.format(gone)
    folder.mkdir(mode=0o700)
    sweep()
    assert folder.exists()


def test_what_is_no_folder_stays(temporary: Path, gone: int) -> None:
    target = temporary / "target"
    target.mkdir(mode=0o700)
    link = temporary / f"kvarts-{gone}-abcd_123"
    link.symlink_to(target)
    file = temporary / f"kvarts-{gone}-abcd_124"
    file.touch(mode=0o700)
    sweep()
    assert target.exists()
    assert link.is_symlink()
    assert file.exists()

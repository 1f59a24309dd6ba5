"""The folder of this user alone where the two halves of a server meet, as long as its owner lives.

An owner that is killed cannot remove its folder, so that the next server of the same user does.
Whether an owner lives is told by its process id, in the folder's name, and by its lock on the
folder, which the kernel drops however a process ends: of two containers that share a temporary
folder, neither knows the other's ids. It must not know what is talked about inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

SOCKET = "service.sock"
# As mkdtemp fills it up.
_NAME = re.compile(r"kvarts-([1-9][0-9]{0,9})-[a-z0-9_]{8}")
_LONGEST_NAME = "kvarts-1234567890-12345678"
# Linux takes 107 bytes, macOS 103.
_MAX_SOCKET_BYTES = 100
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def private_folder() -> Generator[Path]:
    """Yields a new empty folder, after those of servers that were killed are gone.

    Raises:
        OSError: The temporary folder cannot be written to.
    """
    parent = _parent()
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"kvarts-{os.getpid()}-", dir=parent))
    try:
        descriptor = os.open(folder, _OPEN_FLAGS)
        try:
            # Held until the descriptor is closed. A file system without locks leaves the id.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parent() -> Path:
    """The temporary folder, unless a Unix socket's path in it would be too long."""
    parent = Path(tempfile.gettempdir())
    longest = parent / _LONGEST_NAME / SOCKET
    return parent if len(os.fsencode(longest)) <= _MAX_SOCKET_BYTES else Path("/tmp")


def _sweep(parent: Path) -> None:
    try:
        names = os.listdir(parent)
    except PermissionError:
        # A folder that may be written but not listed: what is in it is not ours to know.
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match and not _is_running(int(match[1])):
            # Whatever is odd about a folder, or happens to it meanwhile, leaves it where it is.
            with contextlib.suppress(OSError):
                _remove_if_abandoned(parent / name)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _remove_if_abandoned(folder: Path) -> None:
    """Removes a folder that is ours in owner, mode and content and that nobody holds.

    Raises:
        OSError: It is no folder, somebody holds it, or it went away.
    """
    descriptor = os.open(folder, _OPEN_FLAGS)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content = os.listdir(descriptor)
        if content not in ([], [SOCKET]):
            return
        if content:
            os.unlink(SOCKET, dir_fd=descriptor)
        # Fails, as it should, where the folder is not empty any more.
        folder.rmdir()
    finally:
        os.close(descriptor)

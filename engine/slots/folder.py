"""The folder of slot files: names inside it, opened without following any link.

Every call opens the folder anew and works relative to it, so that nothing in a name leads out of
it. Each tenant has a folder of its own inside, whose name no client can give. Temporary files have
names that say nothing of the slot's and are locked by their writer: one that is not locked was left
by a process that is dead. A file that a new one replaces keeps its room for a moment, so that nobody
waits for the system to free it but the next file. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass, field

from engine.errors import EngineError, InvalidField
from engine.slots.errors import DiskFull, SlotFileCorrupt, SlotFileNotFound, SlotIo

_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,255}(?<!\.)")
# Of the server's own saves: clients cannot give such a name, and lists do not show it.
_OWN_NAME = re.compile(r"\.autosave-([0-9]{1,6})-([0-9a-f]{16})")
# The same of versions that did not tell models apart.
_UNMARKED_NAME = re.compile(r"\.autosave-([0-9]{1,6})")
_TEMPORARY = re.compile(r"\.saving-[0-9a-f]{32}")
_TENANT = re.compile(r"\.tenant-[0-9a-f]+")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK opening a FIFO would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Neither reads nor waits, whatever the name stands for.
_HOLD_FLAGS = 0 if sys.platform != "linux" else os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class SavedFile:
    """A file of the folder; `modified_ns` is wall time."""

    filename: str
    size_bytes: int
    modified_ns: int


class Temporary:
    """A new file that nobody can name, and that becomes a slot's file at the very end."""

    def __init__(self, folder: int, name: str, descriptor: int, freeing: threading.Lock) -> None:
        """`freeing` is held from `publish` to `close` where a file is replaced."""
        self.descriptor = descriptor
        self._folder = folder
        self._name = name
        self._freeing = freeing
        self._replaced: int | None = None
        self._is_freeing = False

    def publish(self, filename: str) -> None:
        """Makes it durable, then puts it in the place of `filename` in one step.

        Raises:
            OSError: That failed. A failed fsync is not tried again: the system may have forgotten
                the data by then, and the next one would claim that all is well.
        """
        self._hold(filename)
        os.fsync(self.descriptor)
        if self._replaced is not None:
            # Not before: who begins a file waits for this, and must not wait for the disk.
            self._freeing.acquire()
            self._is_freeing = True
        os.rename(self._name, filename, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def remove(self) -> None:
        """Takes it away; if even that fails, the next start does."""
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)

    def close(self) -> None:
        """Lets go of it and of the file that it replaced, whose room is free afterwards.

        What was published is safe by now: that a close fails says nothing of it.
        """
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        if self._replaced is not None:
            with contextlib.suppress(OSError):
                os.close(self._replaced)
        if self._is_freeing:
            self._freeing.release()

    def _hold(self, filename: str) -> None:
        """Opens the file of that name, if there is one: freeing 200 MB takes a rename 40 ms."""
        if sys.platform != "linux":
            return
        with contextlib.suppress(FileNotFoundError):
            self._replaced = os.open(filename, _HOLD_FLAGS, dir_fd=self._folder)


@dataclass(frozen=True)
class SlotFolder:
    """Where slot files of one tenant lie: `root`, which must exist, or a folder of its own in it.

    `tenant` is "" where there is only one, else hex digits. `limit_bytes` is what the files of all
    tenants may take together, those being written included (None: as much as there is). `freeing`
    is held while a replaced file is freed: whose room that is goes on once it is there.
    """

    root: str
    tenant: str = ""
    limit_bytes: int | None = None
    freeing: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @contextlib.contextmanager
    def create(self, filename: str, size_bytes: int = 0) -> Generator[Temporary]:
        """Yields a new file of mode 0600, which is gone afterwards unless it was published.

        Where there is a limit it has `size_bytes` from the beginning: room that is promised to one
        save is no other's.

        Raises:
            InvalidField: `filename` is not a name.
            DiskFull: There is no room; also for what the block raises as OSError.
            SlotIo: The folder cannot be written; the same.
        """
        check_name(filename)
        with self.freeing:
            pass  # the room of a file that was replaced may be the one that this needs
        with _translated(filename), self._opened(make=True) as folder:
            temporary = self._reserve(folder, filename, size_bytes)
            try:
                yield temporary
            except BaseException:
                temporary.remove()
                raise
            finally:
                temporary.close()

    @contextlib.contextmanager
    def open(self, filename: str) -> Generator[int]:
        """Yields a descriptor of a saved file, for reading; closes it.

        Raises:
            InvalidField: `filename` is not a name.
            SlotFileNotFound: There is no such file.
            SlotFileCorrupt: It is no regular file.
            SlotIo: It cannot be read; also for what the block raises as OSError.
        """
        check_name(filename)
        with _translated(filename), self._opened() as folder:
            descriptor = _open_regular(folder, filename)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def delete(self, filename: str) -> int:
        """Deletes a saved file; returns its size.

        Raises:
            InvalidField, SlotFileNotFound, SlotFileCorrupt, SlotIo: as `open`.
        """
        check_name(filename)
        with _translated(filename), self._opened() as folder:
            status = os.stat(filename, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise SlotFileCorrupt(filename, "is no regular file")
            os.unlink(filename, dir_fd=folder)
            os.fsync(folder)
            return status.st_size

    def list(self) -> list[SavedFile]:
        """Returns the regular files that a client could name, by name in byte order.

        Raises:
            SlotIo: The folder cannot be read.
        """
        try:
            with _translated(""), self._opened() as folder:
                found = [_saved(folder, name) for name in sorted(os.listdir(folder))]
        except SlotFileNotFound:
            return []  # a tenant that has saved nothing has no folder yet
        return [file for file in found if file is not None]

    def list_own(self, fingerprint: str) -> dict[int, str]:
        """Returns the server's own saves of a model by slot id.

        Raises:
            SlotIo: The folder cannot be read.
        """
        with _translated(""), self._opened() as folder:
            matches = (_OWN_NAME.fullmatch(name) for name in sorted(os.listdir(folder)))
            mark = _mark(fingerprint)
            return {int(match[1]): match[0] for match in matches if match and match[2] == mark}

    def has_own(self) -> bool:
        """Whether the server saved anything of its own here, of whatever model.

        Raises:
            SlotIo: The folder cannot be read.
        """
        with _translated(""), self._opened() as folder:
            return any(_OWN_NAME.fullmatch(name) for name in os.listdir(folder))

    def list_unmarked(self) -> dict[int, str]:
        """Returns the server's own saves of versions that did not tell models apart, by slot id.

        Raises:
            SlotIo: The folder cannot be read.
        """
        with _translated(""), self._opened() as folder:
            matches = (_UNMARKED_NAME.fullmatch(name) for name in sorted(os.listdir(folder)))
            return {int(match[1]): match[0] for match in matches if match}

    def mark(self, filename: str, slot_id: int, fingerprint: str) -> None:
        """Gives one of them the name of a model's; a newer file of that name is left, and it too.

        Raises:
            SlotFileNotFound, SlotIo: It is gone, or the folder cannot be written.
        """
        check_name(filename)
        marked = own_name(slot_id, fingerprint)
        with _translated(filename), self._opened() as folder:
            with contextlib.suppress(FileNotFoundError):
                if _modified_ns(folder, marked) > _modified_ns(folder, filename):
                    return
            os.rename(filename, marked, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def sweep(self) -> int:
        """Removes what dead processes left behind, for every tenant; returns how many files.

        Raises:
            SlotIo: The folder cannot be read or written.
        """
        with _translated(""), _opened_at(self.root) as root:
            removed = _sweep(root)
            for name in os.listdir(root):
                if _TENANT.fullmatch(name):
                    with _opened_at(name, root) as folder:
                        removed += _sweep(folder)
            return removed

    def _reserve(self, folder: int, filename: str, size_bytes: int) -> Temporary:
        if self.limit_bytes is None:
            return self._create(folder)
        with _opened_at(self.root) as root:
            # Two saves must not both find the same room; other processes save here too.
            fcntl.flock(root, fcntl.LOCK_EX)
            if _used_bytes(root) + size_bytes > self.limit_bytes:
                raise DiskFull(filename)
            temporary = self._create(folder)
            try:
                os.ftruncate(temporary.descriptor, size_bytes)
            except BaseException:
                temporary.remove()
                temporary.close()
                raise
            return temporary

    def _create(self, folder: int) -> Temporary:
        while True:
            name = f".saving-{secrets.token_hex(16)}"
            descriptor = os.open(name, _WRITE_FLAGS, 0o600, dir_fd=folder)
            temporary = Temporary(folder, name, descriptor, self.freeing)
            try:
                # A file system without locks leaves the file to whoever cleans the folder.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                is_there = os.fstat(descriptor).st_nlink > 0
            except BaseException:
                temporary.remove()
                temporary.close()
                raise
            if is_there:
                return temporary
            # A sweep that came between the two took it for a dead one's.
            temporary.close()

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Generator[int]:
        with _opened_at(self.root) as root:
            if not self.tenant:
                yield root
                return
            name = f".tenant-{self.tenant}"
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=root)
            with _opened_at(name, root) as folder:
                yield folder


def is_name(filename: str) -> bool:
    """Whether a slot file may have this name: one plain component, visible, without `..`."""
    return _NAME.fullmatch(filename) is not None and ".." not in filename


def own_name(slot_id: int, fingerprint: str) -> str:
    """The name of the server's own save of a slot of a model."""
    return f".autosave-{slot_id}-{_mark(fingerprint)}"


def _mark(fingerprint: str) -> str:
    """Tells models apart in a name; whose state a file really is, its checksum says."""
    return fingerprint[:16]


def _modified_ns(folder: int, name: str) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns


def check_name(filename: str) -> None:
    """Refuses anything that is neither one plain component nor our own; nothing is cleaned.

    Raises:
        InvalidField: It is not.
    """
    is_own = _OWN_NAME.fullmatch(filename) or _UNMARKED_NAME.fullmatch(filename)
    if not is_name(filename) and not is_own:
        raise InvalidField(
            "filename",
            f"{filename[:80]!r} is not 1 to 255 of A-Z a-z 0-9 . _ - without leading or trailing "
            "dot or double dots",
        )


@contextlib.contextmanager
def _translated(filename: str) -> Generator[None]:
    """Turns errors of the system into the engine's.

    Raises:
        SlotFileNotFound, DiskFull, SlotIo: by errno.
    """
    try:
        yield
    except OSError as error:
        raise _as_engine_error(filename, error) from error


def _as_engine_error(filename: str, error: OSError) -> EngineError:
    number = error.errno or 0
    if number == errno.ENOENT:
        return SlotFileNotFound(filename)
    if number in _FULL:
        return DiskFull(filename)
    return SlotIo(filename, number, error.strerror or str(error))


@contextlib.contextmanager
def _opened_at(name: str, parent: int | None = None) -> Generator[int]:
    """Opens a folder; the root may be reached through links, which are the operator's."""
    flags = _FOLDER_FLAGS if parent is None else _FOLDER_FLAGS | os.O_NOFOLLOW
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_regular(folder: int, name: str) -> int:
    """Opens a file that must be a regular one, asked before and after: devices are not opened."""
    if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise SlotFileCorrupt(name, "is no regular file")
    try:
        descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SlotFileCorrupt(name, "is no regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SlotFileCorrupt(name, "is no regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _used_bytes(root: int) -> int:
    """Bytes of every file of every tenant, whatever it is."""
    total = 0
    for name in os.listdir(root):
        if _TENANT.fullmatch(name):
            with _opened_at(name, root) as folder:
                total += sum(_size(folder, each) for each in os.listdir(folder))
        else:
            total += _size(root, name)
    return total


def _size(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0  # published or removed since it was listed


def _saved(folder: int, name: str) -> SavedFile | None:
    if not is_name(name):
        return None
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None  # deleted since it was listed
    if not stat.S_ISREG(status.st_mode):
        return None
    return SavedFile(name, status.st_size, status.st_mtime_ns)


def _sweep(folder: int) -> int:
    names = [name for name in os.listdir(folder) if _TEMPORARY.fullmatch(name)]
    return sum(_remove_if_dead(folder, name) for name in names)


def _remove_if_dead(folder: int, name: str) -> bool:
    try:
        descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    except OSError:
        return False  # no file of ours, or gone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False  # its writer lives, or another sweep was faster
    finally:
        os.close(descriptor)
    return True

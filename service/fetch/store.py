"""Files that appear whole or not at all, and are fetched by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from service.fetch.errors import FetchError

# Told the bytes done and the bytes in all (None: unknown).
Progress = Callable[[int, int | None], None]


@contextmanager
def exclusive(target: Path, waiting: Callable[[], None]) -> Generator[None]:
    """Holds a lock for whoever writes `target`; `waiting` is called if another holds it.

    The lock is the kernel's, so it ends with its process however that ends.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.with_name(f"{target.name}.lock"), "wb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise FetchError(f"{target.parent}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def place(
    pieces: Iterable[bytes], target: Path, *, sha256: str, size: int, progress: Progress
) -> None:
    """Writes `pieces` to `target` by way of a temporary file, if all have that size and hash.

    Raises:
        FetchError: the content is not what it should be, or cannot be written.
    """
    part = target.with_name(f"{target.name}.tmp")
    digest = hashlib.sha256()
    done = 0
    try:
        with open(part, "wb") as out:
            for piece in pieces:
                done += len(piece)
                if done > size:
                    break
                digest.update(piece)
                out.write(piece)
                progress(done, size)
            out.flush()
            os.fsync(out.fileno())
        if done != size or digest.hexdigest() != sha256:
            raise FetchError(
                f"{target.name}: the content is damaged: {done} bytes with SHA-256 "
                f"{digest.hexdigest()}, expected {size} bytes with {sha256}"
            )
        os.replace(part, target)
    except OSError as error:
        raise FetchError(f"{part}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)

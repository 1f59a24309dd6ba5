"""Digests of files that were read whole before, in the user's private cache folder.

An entry is found by what the system says of the files (device, inode, size, times); a wrong one can
only refuse or admit state of this user's own making. Knows files and digests, no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.gguf.stamp import FileStamp

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORMAT = 1
_MAX_ENTRY_BYTES = 1024
# A write in the same tick of a coarse clock would leave the stamp as it is.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class HashCache:
    """A folder of entries, made with mode 0700 when first written; entries are 0600.

    `now_ns` is wall time, as file systems have it.
    """

    folder: Path
    now_ns: Callable[[], int] = time.time_ns

    def load(self, stamps: Sequence[FileStamp]) -> str | None:
        """Returns the digest of these files, None if it is not known or cannot be read."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path(stamps), flags)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
            if not stat.S_ISREG(status.st_mode) or not is_ours:
                return None
            return _parse(os.read(descriptor, _MAX_ENTRY_BYTES))
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def store(self, stamps: Sequence[FileStamp], digest: str) -> None:
        """Keeps a digest; of files that were changed just now it is not kept.

        Raises:
            OSError: The folder cannot be written.
        """
        newest_ns = max(max(stamp.mtime_ns, stamp.ctime_ns) for stamp in stamps)
        if self.now_ns() - newest_ns < _SETTLED_NS:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(stamps)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(json.dumps({"format": _FORMAT, "content": digest}).encode())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _path(self, stamps: Sequence[FileStamp]) -> Path:
        facts = [(s.device, s.inode, s.size, s.mtime_ns, s.ctime_ns) for s in stamps]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self.folder / f"{name}.json"


def _parse(data: bytes) -> str | None:
    try:
        entry: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    members = cast("dict[str, Any]", entry)
    digest = members.get("content")
    if members.get("format") != _FORMAT or not isinstance(digest, str):
        return None
    return digest if _DIGEST.fullmatch(digest) else None

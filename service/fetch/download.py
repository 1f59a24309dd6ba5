"""One file by HTTP, in as many pieces as the network needs.

What has arrived stays in the partial file, so the next attempt, also of another process, goes on
where this one ended. What the file is for, and whether its content is right, is the caller's.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from service.fetch.store import Progress

_CHUNK_BYTES = 1 << 18
_TIMEOUT_S = 30.0
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416


class DownloadError(Exception):
    """The file did not arrive; what did is kept."""


def download(
    url: str,
    part: Path,
    *,
    max_bytes: int,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Completes `part` from `url`, after what it already holds.

    Args:
        url: an http, https or file address.
        part: the partial file; complete when this returns.
        max_bytes: a longer file is refused.
        progress: told of every piece.
        pause: waits between attempts; a test replaces it.

    Raises:
        DownloadError: refused by the server, too large, or interrupted again and again.
    """
    failure: Exception | None = None
    for pause_s in (0.0, *_PAUSES_S):
        pause(pause_s)
        try:
            if _attempt(url, part, max_bytes=max_bytes, progress=progress):
                return
            failure = DownloadError("the connection ended early")
        except urllib.error.HTTPError as error:
            raise DownloadError(f"the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            failure = error
    raise DownloadError(f"interrupted {1 + len(_PAUSES_S)} times, the last time: {failure}")


def _attempt(url: str, part: Path, *, max_bytes: int, progress: Progress) -> bool:
    """Appends what one connection gives; says whether the file is complete."""
    held = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url)
    # An unpacked answer has another length than the file that it was packed from.
    request.add_header("Accept-Encoding", "identity")
    if held:
        request.add_header("Range", f"bytes={held}-")
    try:
        response = cast("BinaryIO", urllib.request.urlopen(request, timeout=_TIMEOUT_S))
    except urllib.error.HTTPError as error:
        if error.code != _RANGE_NOT_SATISFIABLE or not held:
            raise
        total = error.headers.get("Content-Range", "").rpartition("/")[2]
        if total == str(held):
            return True
        part.unlink()
        return False
    with response:
        # A server that ignores the range starts again from the first byte.
        is_continued = getattr(response, "status", None) == _PARTIAL_CONTENT
        start = held if is_continued else 0
        length = cast("http.client.HTTPResponse", response).headers.get("Content-Length")
        total_bytes = start + int(length) if length is not None else None
        if total_bytes is not None and total_bytes > max_bytes:
            raise DownloadError(f"the file has {total_bytes} bytes, expected at most {max_bytes}")
        return _append(
            response, part, start=start, total=total_bytes, max_bytes=max_bytes, progress=progress
        )


def _append(
    response: BinaryIO,
    part: Path,
    *,
    start: int,
    total: int | None,
    max_bytes: int,
    progress: Progress,
) -> bool:
    done = start
    with open(part, "ab" if start else "wb") as out:
        while chunk := response.read(_CHUNK_BYTES):
            out.write(chunk)
            done += len(chunk)
            if done > max_bytes:
                raise DownloadError(f"the file has more than {max_bytes} bytes")
            progress(done, total)
    return total is None or done == total

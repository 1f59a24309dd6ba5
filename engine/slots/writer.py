"""Writes a slot file piece by piece: no more of the state is in memory than the pieces at hand.

Threads of its own write and hash tensors while the caller gathers the next ones, and the disk is
told to begin at once, so that little is left for the end. Knows arrays and a folder, neither slots nor a device.

Example:
    with SlotWriter.open(folder, "a.slot", manifest, tokens) as writer:
        for piece in manifest.pieces:
            writer.add(piece, content_of(piece))
        size_bytes = writer.publish()
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.slots.folder import SlotFolder, Temporary
from engine.slots.manifest import TOKENS, Manifest, encode_header, file_bytes
from engine.slots.sequence_head import pack_head
from engine.slots.state_layout import Content, Piece, arrays_of

# Each writes a tensor and hashes it while it is in its core's cache.
_THREADS = 2
# Tensors at hand, so that no thread waits for the caller, and no caller for more than one of them.
_IN_FLIGHT = 2 * _THREADS


class SlotWriter:
    """A file being written. Made by `open`; the pieces come in the manifest's order."""

    def __init__(
        self, temporary: Temporary, filename: str, manifest: Manifest, threads: ThreadPoolExecutor
    ) -> None:
        self._temporary = temporary
        self._filename = filename
        self._manifest = manifest
        self._threads = threads
        self._left = list(reversed(manifest.pieces))
        self._digests: dict[str, str] = {}
        self._header_at = 0
        self._size_bytes = 0
        self._storing: deque[tuple[str, Future[str]]] = deque()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, folder: SlotFolder, filename: str, manifest: Manifest, tokens: Sequence[int]
    ) -> Generator[SlotWriter]:
        """Begins a file; unless it is published nothing of it stays.

        Raises:
            EngineError: As `SlotFolder.create`, for everything that is done with the writer.
        """
        # The threads end before the file is closed.
        with (
            folder.create(filename, file_bytes(manifest)) as temporary,
            ThreadPoolExecutor(_THREADS, "slot-write") as threads,
        ):
            writer = cls(temporary, filename, manifest, threads)
            writer._begin(tokens)
            yield writer

    def add(self, piece: Piece, content: Content) -> None:
        """Has the next piece written and hashed while the caller goes on.

        Args:
            piece: Which.
            content: What is in it; it must not change until the file is published.

        Raises:
            OSError: The disk refuses, this piece or one before it.
        """
        assert piece == self._left.pop(), "the pieces come in the manifest's order"
        tensors, arrays = piece.tensors(self._manifest.traits.layout), arrays_of(content)
        assert [each.shape for each in tensors] == [each.shape for each in arrays]
        for tensor, array in zip(tensors, arrays, strict=True):
            self._store(tensor.name, _bytes(array))

    def publish(self) -> int:
        """Completes the file and gives it its name; returns its size in bytes.

        Raises:
            OSError: The disk refuses; the file of that name is what it was.
        """
        assert not self._left, "pieces are missing"
        while self._storing:
            self._settle()
        header = encode_header(replace(self._manifest, digests=self._digests))
        _write(self._temporary.descriptor, header, self._header_at)
        self._temporary.publish(self._filename)
        return self._size_bytes

    def _begin(self, tokens: Sequence[int]) -> None:
        head = pack_head(tokens)
        self._header_at = len(head)
        # The digests are not known yet, the room that they take is.
        header = encode_header(replace(self._manifest, digests={}))
        _write(self._temporary.descriptor, head + header, 0)
        self._size_bytes = len(head) + len(header)
        self._store(TOKENS, _bytes(np.asarray(tokens, "<i4")))

    def _store(self, name: str, data: memoryview) -> None:
        """Has a tensor stored behind all before it, once there are not too many at hand."""
        if len(self._storing) == _IN_FLIGHT:
            self._settle()
        start, self._size_bytes = self._size_bytes, self._size_bytes + len(data)
        self._storing.append((name, self._threads.submit(self._put, data, start)))

    def _settle(self) -> None:
        """Waits for the oldest tensor at hand and raises what storing it raised."""
        name, stored = self._storing.popleft()
        self._digests[name] = stored.result()

    def _put(self, data: memoryview, start: int) -> str:
        """Writes a tensor; returns its hash."""
        descriptor = self._temporary.descriptor
        _write(descriptor, data, start)
        _begin_to_store(descriptor, start, len(data))
        return hashlib.sha256(data).hexdigest()


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of it: the system may take less at a time."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written


def _begin_to_store(descriptor: int, start: int, num_bytes: int) -> None:
    """Has the disk begin with what was written, and waits for nothing.

    On Linux the advice that bytes are not needed any more does that. A file system may refuse
    advice; what cannot be stored is fsync's to tell.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)

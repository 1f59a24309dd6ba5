"""Writes a slot file piece by piece: no more of the state is in memory than the pieces at hand.

Threads of its own hash and write a piece at the same time, and have the disk catch up now and then,
so that little is left for the end. Knows arrays and a folder, neither slots nor a device.

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

_SYNC_BYTES = 32 << 20
# One hashes, one writes, one waits for the disk.
_THREADS = 3


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
        self._unsynced_from = 0
        self._writing: Future[None] | None = None
        self._syncing: Future[None] | None = None

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
        """Writes and hashes the next piece.

        Args:
            piece: Which.
            content: What is in it.

        Raises:
            OSError: The disk refuses.
        """
        assert piece == self._left.pop(), "the pieces come in the manifest's order"
        tensors, arrays = piece.tensors(self._manifest.traits.layout), arrays_of(content)
        assert [each.shape for each in tensors] == [each.shape for each in arrays]
        *others, last = parts = [_bytes(array) for array in arrays]
        self._append(*parts)
        hashing = [self._threads.submit(_digest, part) for part in others]
        digests = [_digest(last), *(each.result() for each in reversed(hashing))]
        names = (tensor.name for tensor in reversed(tensors))
        self._digests |= zip(names, digests, strict=True)

    def publish(self) -> int:
        """Completes the file and gives it its name; returns its size in bytes.

        Raises:
            OSError: The disk refuses; the file of that name is what it was.
        """
        assert not self._left, "pieces are missing"
        self._settle()
        if self._syncing is not None:
            self._syncing.result()
        header = encode_header(replace(self._manifest, digests=self._digests))
        _write(self._temporary.descriptor, header, self._header_at)
        self._temporary.publish(self._filename)
        return self._size_bytes

    def _begin(self, tokens: Sequence[int]) -> None:
        head = pack_head(tokens)
        self._header_at = len(head)
        # The digests are not known yet, the room that they take is.
        header = encode_header(replace(self._manifest, digests={}))
        listed = _bytes(np.asarray(tokens, "<i4"))
        self._append(memoryview(head + header), listed)
        self._digests[TOKENS] = _digest(listed)

    def _append(self, *parts: memoryview) -> None:
        """Has the parts written while the caller goes on."""
        self._settle()
        start = self._size_bytes
        self._size_bytes += sum(len(part) for part in parts)
        self._writing = self._threads.submit(self._put, start, parts)

    def _settle(self) -> None:
        """Waits for the last write, raises what it raised, and has the disk catch up."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.result()
        is_syncing = self._syncing is not None and not self._syncing.done()
        if self._size_bytes - self._unsynced_from < _SYNC_BYTES or is_syncing:
            return
        if self._syncing is not None:
            self._syncing.result()
        self._unsynced_from = self._size_bytes
        self._syncing = self._threads.submit(os.fdatasync, self._temporary.descriptor)

    def _put(self, offset: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            _write(self._temporary.descriptor, part, offset)
            offset += len(part)


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of it: the system may take less at a time."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written

"""Writes a slot file piece by piece: no more of the state is in memory than the pieces at hand.

While one piece is hashed the one before it is written, by a thread that is this file's alone; now
and then that thread has the disk catch up, so that little is left for the end. Knows arrays and a folder, neither slots nor a device.

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
from engine.slots.manifest import TOKENS, Manifest, encode_header
from engine.slots.sequence_head import pack_head
from engine.slots.state_layout import Piece
from engine.step import PageContent

_SYNC_BYTES = 32 << 20


class SlotWriter:
    """A file being written. Made by `open`; the pieces come in the manifest's order."""

    def __init__(self, temporary: Temporary, filename: str, manifest: Manifest) -> None:
        self._temporary = temporary
        self._filename = filename
        self._manifest = manifest
        self._left = list(reversed(manifest.pieces))
        self._digests: dict[str, str] = {}
        self._header_at = 0
        self._size_bytes = 0
        self._unsynced_bytes = 0
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "slot-write")

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, folder: SlotFolder, filename: str, manifest: Manifest, tokens: Sequence[int]
    ) -> Generator[SlotWriter]:
        """Begins a file; unless it is published nothing of it stays.

        Raises:
            EngineError: As `SlotFolder.create`, for everything that is done with the writer.
        """
        with folder.create(filename) as temporary:
            writer = cls(temporary, filename, manifest)
            # Nothing may write any more when the file is closed.
            with writer._thread:
                writer._begin(tokens)
                yield writer

    def add(self, piece: Piece, content: PageContent) -> None:
        """Writes and hashes the next piece.

        Args:
            piece: Which.
            content: Its keys and values.

        Raises:
            OSError: The disk refuses.
        """
        assert piece == self._left.pop(), "the pieces come in the manifest's order"
        for name, array in zip(piece.names, (content.keys, content.values), strict=True):
            assert array.shape[1] == piece.span.num_tokens
            self._tensor(name, array)

    def publish(self) -> int:
        """Completes the file and gives it its name; returns its size in bytes.

        Raises:
            OSError: The disk refuses; the file of that name is what it was.
        """
        assert not self._left, "pieces are missing"
        self._settle()
        header = encode_header(replace(self._manifest, digests=self._digests))
        _write(self._temporary.descriptor, header, self._header_at)
        self._temporary.publish(self._filename)
        return self._size_bytes

    def _begin(self, tokens: Sequence[int]) -> None:
        head = pack_head(tokens)
        self._header_at = len(head)
        # The digests are not known yet, the room that they take is.
        self._append(head + encode_header(replace(self._manifest, digests={})))
        self._tensor(TOKENS, np.asarray(tokens, "<i4"))

    def _tensor(self, name: str, array: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._digests[name] = hashlib.sha256(data).hexdigest()
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        self._settle()
        self._writing = self._thread.submit(self._put, data, self._size_bytes)
        self._size_bytes += len(data)

    def _settle(self) -> None:
        """Waits for the last write, and raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        _write(self._temporary.descriptor, data, offset)
        self._unsynced_bytes += len(data)
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._unsynced_bytes = 0
            os.fdatasync(self._temporary.descriptor)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of it: the system may take less at a time."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written

"""Experts one by one from the file, laid out as the kernels read them.

The record of an expert holds its matrices one behind another, in the order of the stacks that they
are taken from; the planes of each start on a 64-byte block. Layers may differ in their types, so a
slot is as long as the longest record.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelFileError
from engine.gguf.arena import Bytes, Matrix, fill_matrix, plan_matrix
from engine.gguf.header import TensorInfo
from engine.gguf.layouts import BLOCK_BYTES
from engine.gguf.reader import GgufFile
from engine.gguf.stamp import FileStamp

Fill = Callable[[Bytes, Matrix, Type, Bytes, str], None]


@dataclass(frozen=True)
class _Stack:
    """A tensor of the file, and where its part of a record lies."""

    info: TensorInfo
    place: Matrix


class ExpertRecords:
    """Reads records with pread, from any thread; holds the files open."""

    def __init__(
        self,
        file: GgufFile,
        layers: Sequence[Sequence[str]],
        *,
        tiled: bool = False,
        fill: Fill | None = None,
    ) -> None:
        """Plans records of `layers`, each the names of its stacks.

        Args:
            file: Where they are.
            layers: The stacks of each layer.
            tiled: Lay matrices out for the native kernels.
            fill: Encodes a matrix in place of `fill_matrix`, to the same bytes.

        Raises:
            ModelFileError: A tensor is missing, or the file is not the one that was opened.
            UnsupportedModel: A tensor is of a type without a layout.
        """
        self._name = file.name
        self._fill = fill or _fill
        # Of one thread: fresh memory for every record costs more than reading it.
        self._scratch = threading.local()
        self._layers = [_plan(file, names, tiled) for names in layers]
        self.num_blocks = max(_end(stacks) for stacks in self._layers)
        self._descriptors: list[int] = []
        for stamp in file.stamps:
            self._descriptors.append(_reopen(file.name, stamp))

    @property
    def name(self) -> str:
        """The file's, for errors."""
        return self._name

    def sources(self, layer: int) -> list[tuple[TensorInfo, int]]:
        """Of each stack its tensor, and the descriptor of the file that it is in."""
        return [
            (stack.info, self._descriptors[stack.info.shard_id]) for stack in self._layers[layer]
        ]

    def matrices(self, layer: int) -> list[Matrix]:
        """Where each stack's matrix lies in a record of a layer, in blocks from its start."""
        return [stack.place for stack in self._layers[layer]]

    def blocks_of(self, layer: int) -> int:
        """The length of a layer's records, in blocks of 64 bytes."""
        return _end(self._layers[layer])

    def file_bytes(self, layer: int) -> int:
        """What one expert of a layer takes in the file."""
        return sum(stack.info.nbytes // stack.info.shape[0] for stack in self._layers[layer])

    def read(self, layer: int, expert: int, target: Bytes) -> None:
        """Reads one expert into a slot, uint8 [blocks_of(layer) * 64] or longer.

        Raises:
            ModelFileError: The file is shorter than it was, or a value of it is not finite.
            OSError: It cannot be read.
        """
        blocks = target.reshape(-1, BLOCK_BYTES)
        for stack in self._layers[layer]:
            info = stack.info
            nbytes = info.nbytes // info.shape[0]
            raw = self._room(nbytes)
            self._pread(info, info.offset + expert * nbytes, raw)
            self._fill(blocks, stack.place, info.ggml_type, raw, self._name)

    def _room(self, nbytes: int) -> Bytes:
        held: Bytes | None = getattr(self._scratch, "bytes", None)
        if held is None or len(held) < nbytes:
            held = self._scratch.bytes = np.empty(nbytes, np.uint8)
        return held[:nbytes]

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _pread(self, info: TensorInfo, start: int, into: Bytes) -> None:
        descriptor, view, done = self._descriptors[info.shard_id], memoryview(into.data), 0
        while done < len(into):
            count = os.preadv(descriptor, [view[done:]], start + done)
            if not count:
                raise ModelFileError(self._name, f"ends inside tensor {info.name!r}")
            done += count


def _fill(data: Bytes, matrix: Matrix, ggml_type: Type, raw: Bytes, file_name: str) -> None:
    for _ in fill_matrix(data, matrix, ggml_type, raw, file_name):
        pass  # each piece is in its place by then


def _plan(file: GgufFile, names: Sequence[str], tiled: bool) -> list[_Stack]:
    stacks: list[_Stack] = []
    next_block = 0
    for name in names:
        place = replace(plan_matrix(file, name, next_block, tiled=tiled), count=1)
        stacks.append(_Stack(file.tensors[name], place))
        next_block += place.stride_blocks
    return stacks


def _end(stacks: Sequence[_Stack]) -> int:
    return sum(stack.place.stride_blocks for stack in stacks)


def _reopen(name: str, stamp: FileStamp) -> int:
    descriptor = os.open(stamp.path, os.O_RDONLY | os.O_CLOEXEC)
    if FileStamp.of(stamp.path, descriptor) != stamp:
        os.close(descriptor)
        raise ModelFileError(name, "was changed while it was being read")
    return descriptor

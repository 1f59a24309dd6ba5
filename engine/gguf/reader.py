"""GGUF files, mapped: one model out of one file or of several shards.

Nothing is copied until it is asked for; pages that were read can be given back, so a load never
holds the file beside what it became. Knows the container only, neither models nor quantisations.

Example:
    with GgufFile.open("model-00001-of-00002.gguf") as file:
        file.metadata.get_str("general.architecture")
        file.raw("token_embd.weight")

Source: the GGUF specification; split naming as llama.cpp's llama_split_path.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
import numpy.typing as npt

from engine.errors import ModelFileError
from engine.gguf.header import Header, TensorInfo, parse_header
from engine.gguf.metadata import Metadata
from engine.gguf.stamp import FileStamp

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_SHARDS = (1 << 16) - 1


class GgufFile:
    """An open GGUF model. Made by `open`; a context manager.

    Attributes:
        name: Base name of the (first) file.
        metadata: The keys of the first shard.
        tensors: Every tensor of every shard by name, in file order.
        stamps: The files as they were when they were opened, by shard.
    """

    def __init__(
        self,
        name: str,
        maps: tuple[mmap.mmap, ...],
        metadata: Metadata,
        headers: list[Header],
        stamps: tuple[FileStamp, ...],
    ) -> None:
        self.name = name
        self.metadata = metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: info for header in headers for name, info in header.tensors.items()}
        )
        self.stamps = stamps
        self._maps = maps

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Opens a model by its file, or by any one of its shards.

        Raises:
            ModelFileError: A file cannot be read, is damaged, or does not fit its shards.
        """
        path = Path(path)
        first_map, header, stamp = _open_one(path, shard_id=0)
        metadata = Metadata(first_map, header.entries, path.name)
        count = metadata.get_uint("split.count", 0, maximum=_MAX_SHARDS)
        if count <= 1:
            return cls(path.name, (first_map,), metadata, [header], (stamp,))
        paths = _shard_paths(path, metadata, count)
        shards = [_open_shard(shard, index, count) for index, shard in enumerate(paths)]
        maps, headers = tuple(shard[0] for shard in shards), [shard[1] for shard in shards]
        stamps = tuple(shard[2] for shard in shards)
        metadata = Metadata(maps[0], headers[0].entries, paths[0].name)
        _check_whole(paths, headers, metadata)
        return cls(paths[0].name, maps, metadata, headers, stamps)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns a tensor's bytes as the file has them: 1-D, read-only, not a copy.

        Raises:
            ModelFileError: There is no such tensor.
            ValueError: The file is closed.
        """
        info = self._info(name)
        return np.frombuffer(self._map(info), np.uint8, info.nbytes, info.offset)

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """Lets go of the memory behind bytes `start .. end` of a tensor (by default, all of it).

        Views stay valid: a page that is touched again is read from the file again, so it does no
        harm that the first page may hold a neighbour's bytes too. The last page is kept unless
        the range covers it, because a reader that walks forward needs it next.

        Raises:
            ModelFileError: There is no such tensor.
            ValueError: The file is closed.
        """
        info = self._info(name)
        mapped = self._map(info)
        first = (info.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        last = info.offset + (info.nbytes if end is None else min(end, info.nbytes))
        length = last // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Drops the mapping; the memory goes when the last view of it goes."""
        self._maps = ()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(path=self.name, detail=f"tensor {name!r} is missing")
        return info

    def _map(self, info: TensorInfo) -> mmap.mmap:
        if not self._maps:
            raise ValueError(f"{self.name} is closed")
        return self._maps[info.shard_id]


def _open_one(path: Path, shard_id: int) -> tuple[mmap.mmap, Header, FileStamp]:
    try:
        # Asked before opening: opening a FIFO would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError(path=path.name, detail="not a regular file")
        with path.open("rb") as file:
            stamp = FileStamp.of(os.path.abspath(path), file.fileno())
            if stamp.size == 0:
                raise ModelFileError(path=path.name, detail="the file is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL, or a file cut to nothing since the check.
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise ModelFileError(path=path.name, detail=f"cannot be read: {reason}") from error
    return mapped, parse_header(mapped, path.name, shard_id), stamp


def _shard_paths(path: Path, metadata: Metadata, count: int) -> list[Path]:
    number = metadata.get_uint("split.no", maximum=count - 1) + 1
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number, count):
        raise ModelFileError(
            path=path.name,
            detail=f"shard {number} of {count} must be named *-{number:05d}-of-{count:05d}.gguf",
        )
    prefix = match["prefix"]
    return [path.with_name(f"{prefix}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _open_shard(path: Path, shard_id: int, count: int) -> tuple[mmap.mmap, Header, FileStamp]:
    mapped, header, stamp = _open_one(path, shard_id)
    metadata = Metadata(mapped, header.entries, path.name)
    for key, expected in (("split.no", shard_id), ("split.count", count)):
        value = metadata.get_uint(key)
        if value != expected:
            raise metadata.error(key, f"is {value}, expected {expected}")
    return mapped, header, stamp


def _check_whole(paths: list[Path], headers: list[Header], metadata: Metadata) -> None:
    seen: set[str] = set()
    for path, header in zip(paths, headers, strict=True):
        for name in header.tensors:
            if name in seen:
                raise ModelFileError(
                    path=path.name, detail=f"tensor {name!r} is also in an earlier shard"
                )
            seen.add(name)
    expected = metadata.get_uint("split.tensors.count")
    if len(seen) != expected:
        raise metadata.error("split.tensors.count", f"is {expected}, the shards hold {len(seen)}")

"""A safetensors file, read as untrusted bytes: a JSON head, then raw little-endian tensors.

Only what an adapter may hold is read: floating-point tensors in f32, f16 or bf16. As the format
wants it, names are distinct, and the tensors' data fills the file without a hole or an overlap.

Source: the safetensors format description (8-byte length, JSON, data).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from engine.adapters.content import Values, from_bytes
from engine.adapters.errors import AdapterFileInvalid
from engine.adapters.regular_file import RegularFile

# Objects of JSON take up to 24 times its bytes, so a head may be this long, or this part of its file.
_MAX_HEAD_BYTES = 2 << 20
_HEAD_SHARE = 16
_NUMBERS = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2)}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; `start` and `end` count from the beginning of the file."""

    name: str
    number: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """The tensors of an open file, by name."""

    def __init__(self, file: RegularFile) -> None:
        """Reads the head.

        Raises:
            AdapterFileInvalid: The file cannot be read or is damaged.
        """
        self._file = file
        self.tensors: Mapping[str, StoredTensor] = self._read_head()

    def read(self, name: str) -> Values:
        """Returns a tensor that is listed.

        Raises:
            AdapterFileInvalid: It cannot be read any more.
        """
        info = self.tensors[name]
        raw = self._file.read(info.start, info.end - info.start)
        return from_bytes(raw, info.number, info.shape)

    def _read_head(self) -> dict[str, StoredTensor]:
        size = self._file.size
        if size < 8:
            raise self._error("has no head" if size else "the file is empty")
        (length,) = struct.unpack("<Q", self._file.read(0, 8).tobytes())
        if length > min(size - 8, max(_MAX_HEAD_BYTES, size // _HEAD_SHARE)):
            raise self._error(f"has a head of {length} bytes in a file of {size}")
        try:
            text = self._file.read(8, length).tobytes()
            head: Any = json.loads(text, object_pairs_hook=_distinct)
        except _RepeatedName as error:
            raise self._error(f"has a head with two entries of {error.name[:128]!r}") from error
        except (ValueError, RecursionError) as error:
            raise self._error("has a head that is no JSON") from error
        if not isinstance(head, dict):
            raise self._error("has a head that is no object")
        entries = cast("dict[str, Any]", head)
        entries.pop("__metadata__", None)
        first = 8 + length
        tensors = {name: self._tensor(name, entry, first) for name, entry in entries.items()}
        self._check_spans(first, tensors.values())
        return tensors

    def _check_spans(self, first: int, tensors: Iterable[StoredTensor]) -> None:
        at = first
        for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
            if tensor.start != at:
                where = "overlaps another" if tensor.start < at else "begins behind a hole"
                raise self._error(f"tensor {tensor.name[:128]!r} {where}")
            at = tensor.end
        if at != self._file.size:
            raise self._error(f"has {self._file.size - at} bytes behind its tensors")

    def _tensor(self, name: str, entry: Any, first: int) -> StoredTensor:
        shown = f"tensor {name[:128]!r}"
        members = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        dtype, shape = members.get("dtype"), members.get("shape")
        if not isinstance(dtype, str) or dtype not in _NUMBERS:
            raise self._error(f"{shown} has type {str(dtype)[:16]!r}, expected F32, F16 or BF16")
        dims, span = _integers(shape), _integers(members.get("data_offsets"))
        if dims is None or len(dims) > 4:
            raise self._error(f"{shown} has a bad shape")
        number, width = _NUMBERS[dtype]
        if span is None or len(span) != 2 or span[1] - span[0] != math.prod(dims) * width:
            raise self._error(f"{shown} has a bad length")
        if first + span[1] > self._file.size:
            raise self._error(f"{shown} ends after the file")
        return StoredTensor(name, number, tuple(dims), first + span[0], first + span[1])

    def _error(self, detail: str) -> AdapterFileInvalid:
        return AdapterFileInvalid(self._file.name, detail)


class _RepeatedName(Exception):
    """A member of an object is there twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise _RepeatedName(name)
        members[name] = value
    return members


def _integers(value: Any) -> list[int] | None:
    """A list of sizes; None for anything else. Sizes of 2^48 and more are no sizes."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    fits = (isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 48 for i in items)
    return cast("list[int]", items) if all(fits) else None

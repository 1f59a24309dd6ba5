"""The head of one GGUF file: where every metadata value and every tensor lies.

Parses nothing but positions, and checks each count, length and offset against the bytes that are
left before it is used, so a hostile head costs no more than reading it. Knows no shards, no
models and no tensor contents.

Source: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3; limits follow llama.cpp.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from mmap import mmap

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelFileError

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_ENTRIES = 1 << 16  # Of keys and of tensors: objects cost more memory than their file bytes.
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMS = 4
_MAX_NUM_ELEMENTS = (1 << 63) - 1
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

SCALAR_CODES: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a metadata value lies: bytes `start .. end` hold `count` elements of `kind`.

    For a lone string `start` is its first character; elements of a string array keep their
    8-byte lengths.
    """

    kind: GGUFValueType
    is_array: bool
    count: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file. `shape` has the outermost dimension first: (rows, cols) of a matrix.

    `offset` counts bytes from the start of shard `shard_id`.
    """

    name: str
    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    shard_id: int


@dataclass(frozen=True)
class Header:
    """Everything a GGUF file says before its tensor data."""

    version: int
    entries: dict[str, Entry]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads forward through a file and never past its end."""

    def __init__(self, buffer: mmap | bytes, file_name: str, size: int) -> None:
        self.buffer = buffer
        self.size = size
        self.offset = 0
        self._file_name = file_name

    def error(self, detail: str) -> ModelFileError:
        return ModelFileError(path=self._file_name, detail=detail)

    def skip(self, num_bytes: int, what: str) -> int:
        """Steps over `num_bytes`, returning where they began."""
        start = self.offset
        left = self.size - start
        if num_bytes > left:
            raise self.error(f"{what} needs {num_bytes} bytes at offset {start}, {left} are left")
        if start + num_bytes > len(self.buffer):
            raise self.error(f"{what} is past the first {len(self.buffer)} bytes of the file")
        self.offset = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.skip(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.skip(8, what))[0]
        return value

    def name(self, what: str, max_bytes: int) -> str:
        length = self.u64(what)
        if not 1 <= length <= max_bytes:
            raise self.error(f"{what} has a name of {length} bytes, allowed are 1 to {max_bytes}")
        start = self.skip(length, what)
        try:
            return self.buffer[start : self.offset].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} has a name that is not UTF-8") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Steps over `count` length-prefixed strings, the hot loop of opening a file."""
        offset, buffer, unpack = self.offset, self.buffer, _U64.unpack_from
        index = 0
        try:
            for index in range(count):  # noqa: B007 (the error below reads it)
                offset += 8 + unpack(buffer, offset)[0]
        except (struct.error, OverflowError) as error:
            raise self.error(f"{what}: string {index} of {count} is past the file's end") from error
        if offset > len(self.buffer):
            raise self.error(f"{what}: string {index} of {count} is past the file's end")
        self.offset = offset


def parse_header(
    buffer: mmap | bytes, file_name: str, shard_id: int = 0, *, file_bytes: int | None = None
) -> Header:
    """Reads the head of one file.

    Args:
        buffer: The file, mapped, or as much of its beginning as its head may take.
        file_name: Its base name, for errors.
        shard_id: What `TensorInfo.shard_id` shall be.
        file_bytes: How long the file is; None if the buffer is all of it.

    Raises:
        ModelFileError: The head is damaged, or a tensor's data is not wholly in the file.
    """
    cursor = _Cursor(buffer, file_name, len(buffer) if file_bytes is None else file_bytes)
    version = _parse_version(cursor)
    num_tensors = _parse_count(cursor, "the number of tensors", min_entry_bytes=8 + 1 + 4 + 4 + 8)
    num_keys = _parse_count(cursor, "the number of keys", min_entry_bytes=8 + 1 + 4 + 1)
    entries: dict[str, Entry] = {}
    for index in range(num_keys):
        key = cursor.name(f"key {index}", MAX_KEY_BYTES)
        if key in entries:
            raise cursor.error(f"key {quoted(key)} appears twice")
        entries[key] = _parse_entry(cursor, key)
    alignment = _alignment(cursor, entries)
    tensors = _parse_tensors(cursor, num_tensors, alignment, shard_id)
    return Header(version, entries, tensors)


def _parse_version(cursor: _Cursor) -> int:
    start = cursor.skip(4, "the magic")
    magic = cursor.buffer[start : start + 4]
    if magic != _MAGIC:
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}")
    version = cursor.u32("the version")
    # A small number in the wrong byte order has its low half empty.
    if version and version & 0xFFFF == 0:
        raise cursor.error("big-endian GGUF is not supported (version field is byte-swapped)")
    if version not in _VERSIONS:
        raise cursor.error(f"GGUF version {version} is not supported, versions 2 and 3 are")
    return version


def _parse_count(cursor: _Cursor, what: str, min_entry_bytes: int) -> int:
    count = cursor.u64(what)
    limit = min(MAX_ENTRIES, (cursor.size - cursor.offset) // min_entry_bytes)
    if count > limit:
        raise cursor.error(f"{what} is {count}, a file of {cursor.size} bytes holds up to {limit}")
    return count


def _parse_kind(cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.u32(f"key {quoted(key)}")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.error(f"key {quoted(key)} has unknown value type {number}") from error


def _parse_entry(cursor: _Cursor, key: str) -> Entry:
    what = f"key {quoted(key)}"
    kind = _parse_kind(cursor, key)
    if kind is GGUFValueType.STRING:
        start = cursor.skip(cursor.u64(what), what)
        return Entry(kind, False, 1, start, cursor.offset)
    if kind is not GGUFValueType.ARRAY:
        start = cursor.skip(struct.calcsize("<" + SCALAR_CODES[kind]), what)
        return Entry(kind, False, 1, start, cursor.offset)
    return _parse_array(cursor, key)


def _parse_array(cursor: _Cursor, key: str) -> Entry:
    what = f"key {quoted(key)}"
    kind = _parse_kind(cursor, key)
    if kind is GGUFValueType.ARRAY:
        raise cursor.error(f"{what} is an array of arrays")
    count = cursor.u64(what)
    element_bytes = 8 if kind is GGUFValueType.STRING else struct.calcsize("<" + SCALAR_CODES[kind])
    limit = (cursor.size - cursor.offset) // element_bytes
    if count > limit:
        raise cursor.error(f"{what} has {count} elements, the rest of the file holds up to {limit}")
    start = cursor.offset
    if kind is GGUFValueType.STRING:
        cursor.skip_strings(count, what)
    else:
        cursor.skip(count * element_bytes, what)
    return Entry(kind, True, count, start, cursor.offset)


def _alignment(cursor: _Cursor, entries: dict[str, Entry]) -> int:
    entry = entries.get(ALIGNMENT_KEY)
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.is_array or entry.kind is not GGUFValueType.UINT32:
        raise cursor.error(f"key {ALIGNMENT_KEY!r} must be a uint32")
    alignment: int = _U32.unpack_from(cursor.buffer, entry.start)[0]
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            f"key {ALIGNMENT_KEY!r} is {alignment}, allowed are powers of two up to {MAX_ALIGNMENT}"
        )
    return alignment


def _parse_tensors(
    cursor: _Cursor, count: int, alignment: int, shard_id: int
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    data_bytes = 0
    for index in range(count):
        info = _parse_tensor(cursor, index, shard_id)
        if info.name in tensors:
            raise cursor.error(f"tensor {quoted(info.name)} appears twice")
        # No holes and no overlaps, as llama.cpp demands: data has one meaning only.
        if info.offset != data_bytes:
            raise cursor.error(
                f"tensor {quoted(info.name)} is at data offset {info.offset}, expected {data_bytes}"
            )
        tensors[info.name] = info
        data_bytes = _align(data_bytes + info.nbytes, alignment)
    base = _align(cursor.offset, alignment)
    for name, info in tensors.items():
        end = base + info.offset + info.nbytes
        if end > cursor.size:
            raise cursor.error(
                f"tensor {quoted(name)} ends at byte {end}, the file has {cursor.size} bytes"
            )
    return {
        name: TensorInfo(
            name, info.ggml_type, info.shape, info.nbytes, base + info.offset, shard_id
        )
        for name, info in tensors.items()
    }


def _parse_tensor(cursor: _Cursor, index: int, shard_id: int) -> TensorInfo:
    name = cursor.name(f"tensor {index}", MAX_TENSOR_NAME_BYTES)
    what = f"tensor {quoted(name)}"
    num_dims = cursor.u32(what)
    if num_dims > MAX_DIMS:
        raise cursor.error(f"{what} has {num_dims} dimensions, the limit is {MAX_DIMS}")
    # GGUF writes the fastest dimension first; a tensor without dimensions is one number.
    shape = tuple(cursor.u64(what) for _ in range(num_dims))[::-1] or (1,)
    num_elements = prod(shape)
    if not 1 <= num_elements <= _MAX_NUM_ELEMENTS:
        raise cursor.error(
            f"{what} has shape {shape}, allowed are 1 to {_MAX_NUM_ELEMENTS} elements"
        )
    number = cursor.u32(what)
    try:
        ggml_type = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.error(f"{what} has unknown type {number}") from error
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if shape[-1] % block_elements:
        raise cursor.error(
            f"{what} has {shape[-1]} columns, {ggml_type.name} needs a multiple of {block_elements}"
        )
    nbytes = num_elements // block_elements * block_bytes
    return TensorInfo(name, ggml_type, shape, nbytes, cursor.u64(what), shard_id)


def quoted(name: str) -> str:
    """A name out of a file as errors show it: escaped, and no longer than a line."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment

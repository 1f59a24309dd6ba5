"""The metadata of a GGUF file as a mapping that decodes a value only when it is asked for.

The typed getters are how the rest of the engine reads a model's parameters: a missing key, a
wrong type or a value out of range is an error that names the key; a key with a default may be
missing, one without is required. Knows no key by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from mmap import mmap
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType

from engine.errors import ModelFileError
from engine.gguf.header import SCALAR_CODES, Entry, quoted
from engine.gguf.strings import Strings

Value = int | float | bool | str | npt.NDArray[Any] | Strings

_INTEGERS = frozenset(
    {
        GGUFValueType.UINT8,
        GGUFValueType.INT8,
        GGUFValueType.UINT16,
        GGUFValueType.INT16,
        GGUFValueType.UINT32,
        GGUFValueType.INT32,
        GGUFValueType.UINT64,
        GGUFValueType.INT64,
    }
)
_NUMBERS = _INTEGERS | {GGUFValueType.FLOAT32, GGUFValueType.FLOAT64}
_MAX_UINT = (1 << 32) - 1


class Metadata(Mapping[str, Value]):
    """Keys to values: numbers, bools, str, numpy arrays, and `Strings` for string arrays.

    Strings of arrays stay bytes, because a vocabulary may hold pieces that are not UTF-8.
    """

    def __init__(self, buffer: mmap | bytes, entries: Mapping[str, Entry], file_name: str) -> None:
        self._buffer = buffer
        self._entries = entries
        self._file_name = file_name

    def __getitem__(self, key: str) -> Value:
        entry = self._entries[key]
        if entry.is_array:
            return self._strings(entry) if _is_string(entry) else self._numbers(entry)
        return self._string(key, entry) if _is_string(entry) else self._scalar(entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        # Mapping's own version would decode the value to find out.
        return key in self._entries

    def error(self, key: str, detail: str) -> ModelFileError:
        """Makes the error that says what is wrong with a key's value."""
        return ModelFileError(path=self._file_name, detail=f"key {quoted(key)} {detail}")

    def encoded(self, key: str) -> bytes:
        """Returns a value with its type, as the file has it: equal bytes mean equal values.

        Raises:
            ModelFileError: No such key.
        """
        entry = self._find(key)
        head = f"{entry.kind.name} {int(entry.is_array)} {entry.count}\n".encode()
        return head + self._buffer[entry.start : entry.end]

    def get_uint(self, key: str, default: int | None = None, *, maximum: int = _MAX_UINT) -> int:
        """Returns an integer in 0 .. `maximum`, stored in any integer type.

        Raises:
            ModelFileError: No such key and no default, another type, or out of range.
        """
        entry = self._find(key, required=default is None)
        if entry is None:
            return cast(int, default)
        self._check_kind(key, entry, _INTEGERS, "an integer")
        return self._check_range(key, int(self._scalar(entry)), maximum)

    def get_uints(self, key: str, count: int, default: int | None = None) -> tuple[int, ...]:
        """Returns one integer per layer: an array of `count`, or a scalar repeated `count` times.

        Raises:
            ModelFileError: As `get_uint`, or the array has another length.
        """
        entry = self._find(key, required=default is None)
        if entry is None or not entry.is_array:
            return (self.get_uint(key, default),) * count
        if entry.kind not in _INTEGERS:
            raise self.error(key, f"is {_describe(entry)}, expected integers")
        if entry.count != count:
            raise self.error(key, f"has {entry.count} elements, expected {count}")
        values: list[int] = self._numbers(entry).tolist()
        return tuple(self._check_range(key, value, _MAX_UINT) for value in values)

    def get_float(self, key: str, default: float | None = None) -> float:
        """Returns a finite number, stored in any numeric type.

        Raises:
            ModelFileError: No such key and no default, another type, or not finite.
        """
        entry = self._find(key, required=default is None)
        if entry is None:
            return cast(float, default)
        self._check_kind(key, entry, _NUMBERS, "a number")
        value = float(self._scalar(entry))
        if not math.isfinite(value):
            raise self.error(key, f"is {value}, expected a finite number")
        return value

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """Returns a bool.

        Raises:
            ModelFileError: No such key and no default, or another type.
        """
        entry = self._find(key, required=default is None)
        if entry is None:
            return cast(bool, default)
        self._check_kind(key, entry, frozenset({GGUFValueType.BOOL}), "a bool")
        return bool(self._scalar(entry))

    def get_str(self, key: str, default: str | None = None) -> str:
        """Returns a string.

        Raises:
            ModelFileError: No such key and no default, another type, or not UTF-8.
        """
        entry = self._find(key, required=default is None)
        if entry is None:
            return cast(str, default)
        self._check_kind(key, entry, frozenset({GGUFValueType.STRING}), "a string")
        return self._string(key, entry)

    def get_array(self, key: str) -> npt.NDArray[Any]:
        """Returns an array of numbers or bools in the file's own type, 1-D, a copy.

        Raises:
            ModelFileError: No such key, or another type.
        """
        entry = self._find(key)
        if not entry.is_array or _is_string(entry):
            raise self.error(key, f"is {_describe(entry)}, expected an array of numbers")
        return self._numbers(entry)

    def get_strings(self, key: str) -> Strings:
        """Returns an array of strings, undecoded.

        Raises:
            ModelFileError: No such key, or another type.
        """
        entry = self._find(key)
        if not entry.is_array or not _is_string(entry):
            raise self.error(key, f"is {_describe(entry)}, expected an array of strings")
        return self._strings(entry)

    @overload
    def _find(self, key: str) -> Entry: ...
    @overload
    def _find(self, key: str, *, required: bool) -> Entry | None: ...
    def _find(self, key: str, *, required: bool = True) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None and required:
            raise self.error(key, "is missing")
        return entry

    def _check_kind(
        self, key: str, entry: Entry, kinds: frozenset[GGUFValueType], expected: str
    ) -> None:
        if entry.is_array or entry.kind not in kinds:
            raise self.error(key, f"is {_describe(entry)}, expected {expected}")

    def _check_range(self, key: str, value: int, maximum: int) -> int:
        if not 0 <= value <= maximum:
            raise self.error(key, f"is {value}, allowed are 0 to {maximum}")
        return value

    def _scalar(self, entry: Entry) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(
            "<" + SCALAR_CODES[entry.kind], self._buffer, entry.start
        )[0]
        return value

    def _string(self, key: str, entry: Entry) -> str:
        try:
            return self._buffer[entry.start : entry.end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(key, f"is not UTF-8 at byte {error.start}") from error

    def _numbers(self, entry: Entry) -> npt.NDArray[Any]:
        code = "<" + SCALAR_CODES[entry.kind]
        data = self._buffer[entry.start : entry.end]
        if entry.kind is GGUFValueType.BOOL:
            # A byte that is neither 0 nor 1 is not a valid numpy bool.
            return np.frombuffer(data, np.uint8) != 0
        return np.frombuffer(data, np.dtype(code))

    def _strings(self, entry: Entry) -> Strings:
        return Strings(self._each_string(entry))

    def _each_string(self, entry: Entry) -> Iterator[bytes]:
        buffer, unpack = self._buffer, struct.Struct("<Q").unpack_from
        start = entry.start
        for _ in range(entry.count):
            end = start + 8 + unpack(buffer, start)[0]
            yield buffer[start + 8 : end]
            start = end


def _is_string(entry: Entry) -> bool:
    return entry.kind is GGUFValueType.STRING


def _describe(entry: Entry) -> str:
    name = entry.kind.name.lower()
    return f"an array of {entry.count} {name}" if entry.is_array else f"of type {name}"

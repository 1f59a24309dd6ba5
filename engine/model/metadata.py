"""The keys of one architecture in a GGUF file, and the record of which ones were used.

Only the prefix `<architecture>.` matters to the maths; whatever a builder did not read is checked
at the end, so that a forgotten key refuses the file instead of changing its answers.
"""

from __future__ import annotations

import numpy as np
from gguf import constants

from engine.errors import ModelFileError, UnsupportedModel
from engine.gguf.reader import GgufFile

# Read elsewhere, or facts for people: none changes what a decoder computes.
_NEUTRAL = frozenset({"vocab_size", "context_length", "tensor_data_layout", "pooling_type"})


def _known_suffixes() -> frozenset[str]:
    """Every `{arch}.` key that the gguf package, and so llama.cpp, gives a meaning to."""
    found: set[str] = {"rope.scale_linear"}
    pending: list[type] = [constants.Keys]
    while pending:
        for value in vars(pending.pop()).values():
            if isinstance(value, type):
                pending.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                found.add(value.removeprefix("{arch}."))
    return frozenset(found)


class ArchitectureKeys:
    """Typed access to `<architecture>.*`, remembering what was read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        """Reads from `file` under the prefix `architecture`."""
        self.file = file
        self.architecture = architecture
        self._read: set[str] = set()

    def _key(self, suffix: str) -> str:
        self._read.add(suffix)
        return f"{self.architecture}.{suffix}"

    def uint(
        self, suffix: str, default: int | None = None, *, least: int = 1, most: int = 2**32 - 1
    ) -> int:
        """An integer from `least` to `most`.

        Raises:
            ModelFileError: It is absent without a default, of another type, or out of range.
        """
        key = self._key(suffix)
        value = self.file.metadata.get_uint(key, default, maximum=most)
        if value < least:
            raise ModelFileError(self.file.name, f"{key} is {value}, expected at least {least}")
        return value

    def layer_uint(self, suffix: str, layer: int, default: int | None = None) -> int:
        """An integer from 1 that may be given per layer: the one of a layer, and of all not 0.

        Raises:
            ModelFileError: As `uint`, or there is none of this layer.
            UnsupportedModel: Layers differ.
        """
        key, metadata = self._key(suffix), self.file.metadata
        value = metadata.get(key)
        if not isinstance(value, np.ndarray):
            return self.uint(suffix, default)
        if value.dtype.kind not in "iu" or len(value) <= layer or value[layer] < 1:
            raise metadata.error(key, f"has no positive integer for layer {layer}")
        if others := set(value.tolist()) - {0, int(value[layer])}:
            raise self.error(
                suffix, sorted(others)[0], f"{value[layer]} in all layers that have any"
            )
        return int(value[layer])

    def real(self, suffix: str, default: float | None = None) -> float:
        """A number. Raises ModelFileError like `uint`."""
        return self.file.metadata.get_float(self._key(suffix), default)

    def positive(self, suffix: str, default: float | None = None) -> float:
        """A number above 0. Raises ModelFileError like `uint`."""
        value = self.real(suffix, default)
        if value <= 0:
            key = f"{self.architecture}.{suffix}"
            raise ModelFileError(self.file.name, f"{key} is {value}, expected more than 0")
        return value

    def text(self, suffix: str, default: str | None = None) -> str:
        """A string. Raises ModelFileError like `uint`."""
        return self.file.metadata.get_str(self._key(suffix), default)

    def flag(self, suffix: str, default: bool | None = None) -> bool:
        """A bool. Raises ModelFileError like `uint`."""
        return self.file.metadata.get_bool(self._key(suffix), default)

    def flags(self, suffix: str, count: int) -> tuple[bool, ...] | None:
        """One flag per layer where the file has an array; None where it has none or one value.

        Raises:
            ModelFileError: The array has another length, or holds neither integers nor bools.
        """
        key, metadata = self._key(suffix), self.file.metadata
        value = metadata.get(key)
        if not isinstance(value, np.ndarray):
            return None
        if value.dtype.kind not in "iub":
            raise metadata.error(key, f"is an array of {value.dtype}, expected bools")
        if len(value) != count:
            raise metadata.error(key, f"has {len(value)} elements, expected {count}")
        return tuple(bool(flag) for flag in value)

    def require(self, suffix: str, expected: float) -> None:
        """Accepts a number only if absent or as expected: anything else is not implemented.

        Raises:
            UnsupportedModel: It has another value.
        """
        key = self._key(suffix)
        value = self.file.metadata.get_float(key, expected)
        if value != expected:
            raise self.error(suffix, value, str(expected))

    def ignore(self, *suffixes: str) -> None:
        """Marks keys that the builder knows and llama.cpp does not use either."""
        self._read.update(suffixes)

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this full name."""
        return name in self.file.tensors

    def biases(self, *names: str, layer: int = 0) -> frozenset[str]:
        """Which of these matrices have a bias, judged by the first layer that has them."""
        return frozenset(n for n in names if self.has_tensor(f"blk.{layer}.{n}.bias"))

    def vocab_size(self) -> int:
        """Rows of the embedding, which is what token ids index.

        Raises:
            UnsupportedModel: The file has no token embedding.
        """
        tensor = self.file.tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise UnsupportedModel(self.file.name, "tensor token_embd.weight is missing")
        return tensor.shape[0]

    def error(self, suffix: str, value: object, expected: str) -> UnsupportedModel:
        """An error that names the key, its value and what is implemented."""
        key = f"{self.architecture}.{suffix}"
        return UnsupportedModel(
            self.file.name, f"{key} is {value!r}, only {expected} is implemented"
        )

    def refuse_unread(self) -> None:
        """Refuses keys with a meaning that nothing has read.

        Raises:
            UnsupportedModel: Names the first such key.
        """
        prefix = f"{self.architecture}."
        present = {k.removeprefix(prefix) for k in self.file.metadata if k.startswith(prefix)}
        if unread := sorted((present & _known_suffixes()) - self._read - _NEUTRAL):
            raise UnsupportedModel(
                self.file.name,
                f"{prefix}{unread[0]} changes the maths and is not implemented for "
                f"{self.architecture}",
            )

"""The native kernels in tests: skipped by name where they were not built, run on each of their sets."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from engine.kernels import native

NOT_BUILT = "the native kernels were not built"
requires_native = pytest.mark.skipif(native.isa() is None, reason=NOT_BUILT)


def instruction_sets() -> list[str]:
    """The sets of instructions that the library has kernels for and this processor runs."""
    if native.isa() is None:
        return []
    found: list[str] = []
    for name in ("portable", "avx2", "avxvnni", "avx512vnni", "dotprod", "i8mm"):
        try:
            with instructions(name):
                found.append(name)
        except ValueError:
            continue
    return found


@contextmanager
def instructions(name: str) -> Generator[None]:
    """Runs the kernels of one set of instructions.

    Raises:
        ValueError: This processor does not have it.
    """
    library = ctypes.CDLL(str(native.LIBRARY))
    library.kvarts_isa.restype = ctypes.c_char_p
    library.kvarts_use_isa.restype = ctypes.c_bool
    before = library.kvarts_isa()
    if not library.kvarts_use_isa(name.encode()):
        raise ValueError(f"this processor does not run {name}")
    try:
        yield
    finally:
        library.kvarts_use_isa(before)

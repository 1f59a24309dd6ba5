"""Damaged GGUF files, made by changing what a file's structure says, and the checks on them.

    python -m tests.unit.engine.gguf.mutants 20000

runs as many as asked for; the tests run a few hundred. A mutant is named by its seed file and its
number, and the same name always gives the same bytes.
"""

from __future__ import annotations

import re
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from engine.errors import EngineError
from engine.gguf.arena import build_arena, read_arrays
from engine.gguf.reader import GgufFile
from engine.gguf.vocab import read_vocab
from tests.ggufs import TinyLlama, random_blocks, write_gguf, write_llama

SCALAR_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
# Seeds are under 100 kB: what is worked on may be copied and widened, and nothing more.
PEAK_BYTES = 8 << 20
MOST_S = 1.0


@dataclass(frozen=True)
class Field:
    """An integer of the head: its place and width in bytes."""

    start: int
    width: int


def fields(data: bytes) -> list[Field]:
    """Every integer in the head of a sound file (of string arrays, the first and last lengths)."""
    found = [Field(4, 4), Field(8, 8), Field(16, 8)]
    num_tensors, num_keys = struct.unpack_from("<QQ", data, 8)
    at = 24

    def take(width: int, *, is_kept: bool = True) -> int:
        nonlocal at
        if is_kept:
            found.append(Field(at, width))
        value = int.from_bytes(data[at : at + width], "little")
        at += width
        return value

    def take_text(*, is_kept: bool = True) -> None:
        nonlocal at
        length = take(8, is_kept=is_kept)
        at += length

    for _ in range(num_keys):
        take_text()
        kind = take(4)
        if kind == STRING:
            take_text()
        elif kind == ARRAY:
            kind, count = take(4), take(8)
            for index in range(count):
                is_kept = index < 2 or index > count - 3
                if kind == STRING:
                    take_text(is_kept=is_kept)
                else:
                    take(SCALAR_WIDTHS[kind], is_kept=is_kept)
        else:
            take(SCALAR_WIDTHS[kind])
    for _ in range(num_tensors):
        take_text()
        for _ in range(take(4)):
            take(8)
        take(4)
        take(8)
    return found


def write_seeds(folder: Path) -> dict[str, bytes]:
    """Sound files to start from: models of both tokenizers, every block type, and a shard."""
    rng = np.random.default_rng(0)
    small = TinyLlama(num_layers=1, width=32, num_heads=2, num_kv_heads=1, hidden=32)
    types = (Type.F16, Type.BF16, Type.Q4_0, Type.Q5_1, Type.Q8_0, Type.Q3_K, Type.IQ2_XXS)
    blocks = {f"{t.name}.weight": (random_blocks(rng, t, (3, 256)), t) for t in types}
    keys = {"a": 1, "b": True, "c": 0.5, "d": [1, 2, 3], "e": ["x", "yz"], "f": [0.5]}
    write_llama(folder / "spm.gguf", small)
    write_llama(folder / "bpe.gguf", replace(small, ggml_type=Type.Q4_1, tokenizer="bpe"))
    write_gguf(folder / "blocks.gguf", keys, blocks, alignment=64)
    write_gguf(folder / "old.gguf", keys, blocks, version=2)
    write_gguf(folder / "split.gguf", keys, blocks, split_max_tensors=4)
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.gguf"))}


def mutate(rng: np.random.Generator, data: bytes, places: list[Field]) -> bytes:
    """Changes one thing, sometimes two or three."""
    mutant = bytearray(data)
    head_end = places[-1].start + places[-1].width
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        field = places[rng.integers(len(places))]
        at = int(rng.integers(head_end))
        match int(rng.integers(10)):
            case 0:
                bit = 1 << int(rng.integers(8))
                mutant[at : at + 1] = bytes(byte ^ bit for byte in mutant[at : at + 1])
            case 1:
                del mutant[at : at + int(rng.integers(1, 64))]
            case 2:
                mutant[at:at] = mutant[at : at + int(rng.integers(1, 64))]
            case 3:
                del mutant[int(rng.integers(len(mutant) + 1)) :]
            case 4:
                other = places[rng.integers(len(places))]
                taken = data[other.start : other.start + other.width]
                mutant[field.start : field.start + field.width] = taken.ljust(field.width, b"\0")[
                    : field.width
                ]
            case _:
                held = int.from_bytes(data[field.start : field.start + field.width], "little")
                value = interesting(rng, held, len(data)) % (1 << 8 * field.width)
                mutant[field.start : field.start + field.width] = value.to_bytes(
                    field.width, "little"
                )
    return bytes(mutant)


def interesting(rng: np.random.Generator, value: int, size: int) -> int:
    """A number in a value's place, in a file of a size."""
    edges = [1 << 8, 1 << 16, 1 << 31, 1 << 32, 1 << 60, 1 << 61, 1 << 62, 1 << 63, 1 << 64]
    near = [edge + step for edge in (0, value, size, *edges) for step in (-8, -1, 0, 1)]
    choices = [*near, value * 2, value // 2, *range(16), 24, 32, 33, 41, 64, 65537]
    return choices[int(rng.integers(len(choices)))]


def load(path: Path) -> None:
    """Everything that a server reads of a model file."""
    with GgufFile.open(path) as file:
        for key in file.metadata:
            with suppress(EngineError):
                file.metadata[key]
        with suppress(EngineError):
            read_vocab(file.metadata)
        for name, info in file.tensors.items():
            if len(info.shape) == 1:
                read_arrays(file, [name])
        matrices = [name for name, info in file.tensors.items() if len(info.shape) > 1]
        build_arena(file, matrices)


@dataclass(frozen=True)
class Outcome:
    """What one mutant did. `error` is empty if it loaded."""

    name: str
    number: int
    error: str
    peak_bytes: int
    wall_s: float


def run(count: int, folder: Path) -> Iterator[Outcome]:
    """Loads `count` mutants; anything but a typed error goes through to the caller."""
    seeds = write_seeds(folder)
    places = {name: fields(data) for name, data in seeds.items()}
    names = list(seeds)

    def write(number: int) -> tuple[str, Path]:
        name = names[number % len(names)]
        rng = np.random.default_rng([number, len(name)])
        path = folder / name
        path.write_bytes(mutate(rng, seeds[name], places[name]))
        return name, path

    def restore(name: str) -> None:
        (folder / name).write_bytes(seeds[name])

    yield from watched(count, write, load, restore)


def watched(
    count: int,
    write: Callable[[int], tuple[str, Path]],
    load: Callable[[Path], object],
    restore: Callable[[str], None],
) -> Iterator[Outcome]:
    """Writes and loads mutants, and puts their seeds back; tells time and memory of each."""
    tracemalloc.start()
    try:
        for number in range(count):
            name, path = write(number)
            tracemalloc.reset_peak()
            before, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
            error = ""
            try:
                load(path)
            except EngineError as caught:
                error = str(caught)
            except BaseException as caught:
                caught.add_note(f"mutant {number} of {name}")
                raise
            wall_s = time.perf_counter() - start
            yield Outcome(name, number, error, tracemalloc.get_traced_memory()[1] - before, wall_s)
            restore(name)
    finally:
        tracemalloc.stop()


def kind_of(error: str) -> str:
    """An error without its names and numbers."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|b?'.*'|\d+", "#", error.partition(": ")[2])


def report(outcomes: Sequence[Outcome]) -> None:
    """Prints what became of them, and fails if one took too much memory or time."""
    kinds = Counter(kind_of(outcome.error) or "loaded" for outcome in outcomes)
    for kind, count in kinds.most_common():
        print(f"{count:7} {kind}")
    slowest = max(outcomes, key=lambda outcome: outcome.wall_s)
    largest = max(outcomes, key=lambda outcome: outcome.peak_bytes)
    print(slowest, largest, sep="\n")
    assert largest.peak_bytes <= PEAK_BYTES
    assert slowest.wall_s <= MOST_S


def main() -> None:
    """Runs and reports."""
    with tempfile.TemporaryDirectory() as folder:
        report(list(run(int(sys.argv[1]), Path(folder))))


if __name__ == "__main__":
    main()

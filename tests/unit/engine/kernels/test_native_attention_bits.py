"""Native attention against itself, bit by bit: alone, in a batch, in chunks, on any page size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.kernels.paged_attention import (
    SPAN,
    SPANS,
    VARIANTS,
    Float32,
    Paged,
    Sequences,
    Shape,
    assert_close,
)

pytestmark = requires_native

BITS = [
    Shape(),
    Shape(dtype="f4", head_dim=24, num_heads=3, num_kv_heads=1),
    Shape(head_dim=80, window=100),
    Shape(head_dim=64, num_heads=9, num_kv_heads=3, soft_cap=4.0),
    *VARIANTS,
]
CROWD = [200, 64, 65, 1, 63, 128, 300, 17]
# More rows than are worth splitting: each walks its own spans, where one alone shares them out.
LONG = [*SPANS, 700, 3, *[5] * 30]


def decode_bits(shape: Shape, lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    paged = Paged(Sequences(shape, lengths), seed=len(lengths))
    for row, length in enumerate(lengths):
        paged.fill(row, length - 1)
    return paged.step([(row, n - 1) for row, n in enumerate(lengths)]).view(np.int32)


def chunk_bits(shape: Shape, length: int, sizes: Sequence[int]) -> npt.NDArray[np.int32]:
    """All tokens of a sequence, in chunks of these sizes, from the first on."""
    paged = Paged(Sequences(shape, [length]), seed=len(sizes))
    results: list[Float32] = []
    first = 0
    for size in sizes:
        results.append(paged.step([], (0, range(first, first + size))))
        first += size
    assert first == length
    return np.concatenate(results).view(np.int32)


@pytest.mark.parametrize("shape", BITS, ids=range(len(BITS)))
def test_a_token_is_the_same_alone_in_a_batch_in_chunks_and_on_any_page_size(shape: Shape) -> None:
    together = decode_bits(shape, CROWD)
    for isa in instruction_sets():
        with instructions(isa):
            np.testing.assert_array_equal(decode_bits(shape, CROWD), together, isa)
    for page in (16, 32, 64):
        other = replace(shape, page=page)
        for row, length in enumerate(CROWD):
            np.testing.assert_array_equal(decode_bits(other, [length])[0], together[row])
    whole = chunk_bits(shape, 200, [200])
    np.testing.assert_array_equal(whole[-1], together[0])
    for size in (1, 7, 8, 50, 64):
        sizes = [size] * (200 // size) + [200 % size] * bool(200 % size)
        np.testing.assert_array_equal(chunk_bits(shape, 200, sizes), whole, str(size))
    for isa in instruction_sets():
        with instructions(isa):
            np.testing.assert_array_equal(chunk_bits(shape, 200, [200]), whole, isa)


@pytest.mark.parametrize("shape", [Shape(), Shape(num_heads=5, num_kv_heads=1, window=SPAN + 9)])
def test_a_token_is_the_same_whether_its_spans_are_shared_out_or_not(shape: Shape) -> None:
    together = decode_bits(shape, LONG)
    for row, length in enumerate(LONG[:6]):
        for isa in instruction_sets():
            with instructions(isa):
                np.testing.assert_array_equal(decode_bits(shape, [length])[0], together[row])
    longest = SPANS[-1]
    for sizes in ([longest], [600, longest - 600], [SPAN, SPAN, longest - 2 * SPAN]):
        whole = chunk_bits(shape, longest, sizes)
        np.testing.assert_array_equal(whole[-1], together[len(SPANS) - 1], str(sizes))


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 100))
def test_any_split_into_chunks_gives_the_same_bits(data: st.DataObject, seed: int) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 3, 8, 16, 40]), min_size=1, max_size=8))
    shape = Shape(head_dim=8, num_heads=3, num_kv_heads=1, window=data.draw(st.integers(1, 120)))
    total = sum(sizes)
    # Padded to one width, so that few programs are compiled.
    results: list[Float32] = []
    paged = Paged(Sequences(shape, [total], seed), seed)
    first = 0
    for size in sizes:
        positions = [*range(first, first + size), *[-1] * (40 - size)]
        results.append(paged.step([], (0, positions))[:size])
        first += size
    single = Paged(Sequences(shape, [total], seed), seed + 1)
    single.fill(0, total - 1)
    alone = single.step([(0, total - 1)])[0]
    np.testing.assert_array_equal(np.concatenate(results)[-1], alone)
    assert_close(paged, np.concatenate(results), [(0, p) for p in range(total)])

"""Pages to and from the host, against the pool array itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.attention import KvPool
from engine.model.page_io import PageIo
from engine.model.place import FULL, WINDOW, Place
from engine.step import PageContent
from engine.types import PoolKind

PAGE, HEADS, DIM = 4, 2, 8
PAGES, WINDOW_PAGES = 9, 5
# Layers 0 and 2 see everything, layers 1 and 3 a window; units lie as `place_layers` puts them.
KINDS = [FULL, WINDOW, FULL, WINDOW]
FIRST_UNITS = [0, 20, 10, 26]
NUM_UNITS = 32
UNITS = {PoolKind.KV: [0, 10], PoolKind.SWA: [20, 26]}
SIZES = {PoolKind.KV: PAGES, PoolKind.SWA: WINDOW_PAGES}
KIND = st.sampled_from([PoolKind.KV, PoolKind.SWA])


def places() -> Place:
    def column(values: list[int]) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    return Place(
        column(KINDS), column(FIRST_UNITS), column([8] * 4), column([0] * 4), column([0] * 4)
    )


def random_pool(seed: int = 0, dtype: Any = np.float16) -> tuple[KvPool, list[npt.NDArray[Any]]]:
    """A pool and copies of its arrays."""
    shape = (NUM_UNITS, PAGE, HEADS, DIM)
    draw = np.random.default_rng(seed)
    keys, values = (draw.standard_normal(shape).astype(dtype) for _ in range(2))
    return KvPool(jnp.array(keys), jnp.array(values)), [keys, values]


@pytest.fixture(scope="module", params=[True, False], ids=["host", "device"])
def page_io(request: pytest.FixtureRequest) -> PageIo:
    return compiled(page_io_of(random_pool()[0], places(), is_in_host_memory=request.param))


def page_io_of(pool: KvPool, layers: Place, *, is_in_host_memory: bool = True) -> PageIo:
    sizes = (PAGES, WINDOW_PAGES)
    return PageIo(pool, layers, sizes, is_in_host_memory=is_in_host_memory)


def compiled(page_io: PageIo) -> PageIo:
    for compile_one in page_io.compilations(random_pool()[0]):
        compile_one()
    return page_io


def gathered(array: npt.NDArray[Any], kind: PoolKind, ids: list[int]) -> npt.NDArray[Any]:
    """[layer, token, head, dim], one page at a time."""
    layers = [[array[first + page_id] for page_id in ids] for first in UNITS[kind]]
    return np.array(layers, array.dtype).reshape(2, -1, HEADS, DIM)


def ids_of(kind: PoolKind, least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, SIZES[kind]), min_size=least, unique=True)


def test_the_layout_says_what_a_page_holds(page_io: PageIo) -> None:
    layout = page_io.layout(PoolKind.SWA)
    assert (layout.num_layers, layout.page_tokens) == (2, PAGE)
    assert layout.key_shape == layout.value_shape == (HEADS, DIM)
    assert layout.dtype == np.float16
    assert layout.token_bytes == 2 * 2 * HEADS * DIM * 2
    with pytest.raises(ValueError, match="moe_cache holds no pages"):
        page_io.layout(PoolKind.MOE_CACHE)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_pages_are_read_in_the_order_asked_for(page_io: PageIo, data: st.DataObject) -> None:
    kind = data.draw(KIND)
    ids = data.draw(ids_of(kind))
    pool, (keys, values) = random_pool()
    content = page_io.read(pool, kind, ids).wait()
    np.testing.assert_array_equal(content.keys, gathered(keys, kind, ids))
    np.testing.assert_array_equal(content.values, gathered(values, kind, ids))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_pages_are_written_and_nothing_else_is(page_io: PageIo, data: st.DataObject) -> None:
    kind = data.draw(KIND)
    ids = data.draw(ids_of(kind, least=1))
    num_tokens = PAGE * len(ids) - data.draw(st.integers(0, PAGE - 1))
    pool, expected = random_pool()
    draw = np.random.default_rng(7)
    shape = (2, num_tokens, HEADS, DIM)
    new = [draw.standard_normal(shape).astype(np.float16) for _ in range(2)]
    written = page_io.write(pool, kind, ids, PageContent(*new))
    for array, given_tokens in zip(expected, new, strict=True):
        for layer, first in enumerate(UNITS[kind]):
            for index, page_id in enumerate(ids):
                part = given_tokens[layer, index * PAGE : (index + 1) * PAGE]
                array[first + page_id] = 0
                array[first + page_id, : len(part)] = part
    check_pages(written, expected)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_pages_are_copied_on_the_device(page_io: PageIo, data: st.DataObject) -> None:
    kind = data.draw(KIND)
    ids = data.draw(ids_of(kind))
    half = len(ids) // 2
    sources, targets = ids[:half], ids[half : 2 * half]
    pool, expected = random_pool()
    copied = page_io.copy(pool, kind, sources, targets)
    for array in expected:
        for first in UNITS[kind]:
            for source, target in zip(sources, targets, strict=True):
                array[first + target] = array[first + source]
    check_pages(copied, expected)


def check_pages(pool: KvPool, expected: list[npt.NDArray[Any]]) -> None:
    """Sinks may hold anything, every other unit what is expected."""
    units = np.setdiff1d(np.arange(NUM_UNITS), FIRST_UNITS)
    for array, wanted in zip((pool.keys, pool.values), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(array)[units], wanted[units])


def test_what_was_read_stays_when_the_pool_changes(page_io: PageIo) -> None:
    pool, (keys, _) = random_pool()
    read = page_io.read(pool, PoolKind.KV, [3, 1])
    zeros = np.zeros((2, 2 * PAGE, HEADS, DIM), np.float16)
    page_io.write(pool, PoolKind.KV, [3, 1], PageContent(zeros, zeros))
    np.testing.assert_array_equal(read.wait().keys, gathered(keys, PoolKind.KV, [3, 1]))


@pytest.mark.parametrize("ids", [[0], [-1], [1, WINDOW_PAGES + 1]])
def test_ids_outside_a_pool_are_refused(page_io: PageIo, ids: list[int]) -> None:
    pool, _ = random_pool()
    zeros = np.zeros((2, len(ids) * PAGE, HEADS, DIM), np.float16)
    with pytest.raises(ValueError, match=r"of a swa pool of 5"):
        page_io.read(pool, PoolKind.SWA, ids)
    with pytest.raises(ValueError, match=r"of a swa pool of 5"):
        page_io.write(pool, PoolKind.SWA, ids, PageContent(zeros, zeros))
    with pytest.raises(ValueError, match=r"of a swa pool of 5"):
        page_io.copy(pool, PoolKind.SWA, ids, [2, 3][: len(ids)])
    assert not pool.keys.is_deleted()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, PAGE, HEADS, DIM), np.float16),
        ((2, PAGE, HEADS, DIM + 1), np.float16),
        ((2, PAGE, HEADS), np.float16),
        ((2, PAGE + 1, HEADS, DIM), np.float16),
        ((2, 0, HEADS, DIM), np.float16),
        ((2, PAGE, HEADS, DIM), np.float32),
    ],
)
def test_content_of_another_shape_is_refused(
    page_io: PageIo, shape: tuple[int, ...], dtype: Any
) -> None:
    pool, _ = random_pool()
    good = np.zeros((2, PAGE, HEADS, DIM), np.float16)
    for content in (
        PageContent(np.zeros(shape, dtype), good),
        PageContent(good, np.zeros(shape, dtype)),
    ):
        with pytest.raises(ValueError, match="content of shape"):
            page_io.write(pool, PoolKind.KV, [1], content)
    assert not pool.keys.is_deleted()


@pytest.mark.parametrize(("sources", "targets"), [([1], []), ([1, 2], [2, 3])])
def test_copies_that_would_read_what_they_wrote_are_refused(
    page_io: PageIo, sources: list[int], targets: list[int]
) -> None:
    with pytest.raises(ValueError, match="cannot be copied"):
        page_io.copy(random_pool()[0], PoolKind.KV, sources, targets)


def test_more_than_a_piece_is_refused(page_io: PageIo) -> None:
    pool, _ = random_pool()
    ids = [1] * (page_io.transfer_pages + 1)
    with pytest.raises(ValueError, match="are the most"):
        page_io.read(pool, PoolKind.KV, ids)


def test_a_pool_without_layers_has_empty_pages() -> None:
    pool, before = random_pool()
    only_windows = Place(*(jnp.asarray([value], jnp.int32) for value in (WINDOW, 20, 8, 0, 0)))
    page_io = compiled(page_io_of(pool, only_windows))
    assert page_io.layout(PoolKind.KV).num_layers == 0
    content = page_io.read(pool, PoolKind.KV, [1, 2]).wait()
    assert content.keys.shape == (0, 2 * PAGE, HEADS, DIM)
    pool = page_io.write(pool, PoolKind.KV, [3, 4], content)
    check_pages(page_io.copy(pool, PoolKind.KV, [1], [2]), before)


def test_reading_leaves_nothing_that_makes_the_next_write_copy_the_pool(page_io: PageIo) -> None:
    pool, (keys, values) = random_pool()
    zeros = PageContent(*(np.zeros((2, PAGE, HEADS, DIM), np.float16) for _ in range(2)))
    pool = page_io.write(pool, PoolKind.KV, [1], zeros)
    places_before = [part.unsafe_buffer_pointer() for part in (pool.keys, pool.values)]
    content = page_io.read(pool, PoolKind.KV, [2, 3])
    pool = page_io.write(pool, PoolKind.KV, [2], zeros)
    assert [part.unsafe_buffer_pointer() for part in (pool.keys, pool.values)] == places_before
    for read, array in zip(
        (content.wait().keys, content.wait().values), (keys, values), strict=True
    ):
        np.testing.assert_array_equal(read, gathered(array, PoolKind.KV, [2, 3]))


@pytest.mark.parametrize("is_in_host_memory", [True, False])
def test_values_of_no_components_are_read_too(is_in_host_memory: bool) -> None:
    """Latent attention has its values in the keys."""
    keys = jnp.ones((NUM_UNITS, PAGE, 1, DIM), jnp.float16)
    pool = KvPool(keys, jnp.ones((NUM_UNITS, PAGE, 1, 0), jnp.float16))
    page_io = page_io_of(pool, places(), is_in_host_memory=is_in_host_memory)
    for compile_one in page_io.compilations(pool):
        compile_one()
    content = page_io.read(pool, PoolKind.KV, [1, 2]).wait()
    assert content.keys.shape == (2, 2 * PAGE, 1, DIM)
    assert content.values.shape == (2, 2 * PAGE, 1, 0)

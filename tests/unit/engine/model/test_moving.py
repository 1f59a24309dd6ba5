"""Moved tokens against rotations in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.attention import KvPool
from engine.model.moving import TokenMoves, can_move
from engine.model.place import place_layers
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    LayerSpec,
    ModelSpec,
    RopePairing,
    RopeSpec,
)

PAGE, HEADS, DIM, PAGES = 4, 2, 8, 12
FACTORS = np.array([1.0, 3.0, 0.5], np.float32)


def spec_of(pairing: RopePairing, window: int | None = None) -> ModelSpec:
    """Two layers with ropes of their own, which turn six of eight components."""
    block = BlockSpec(AttentionSpec(4, HEADS, DIM, 1.0), DenseFfnSpec(8, Activation.SILU))
    ropes = (
        RopeSpec(pairing, 6, 10_000.0, magnitude=1.7),
        RopeSpec(pairing, 6, 500.0, position_scale=0.25, factors="factors"),
    )
    layers = (LayerSpec(block, rope_id=0), LayerSpec(block, window, rope_id=1))
    return ModelSpec("test", 10, 32, 512, 1e-5, layers, ropes, tied_head=True)


def moves_of(spec: ModelSpec, pool: KvPool) -> TokenMoves:
    factors = [None, jnp.asarray(FACTORS)]
    moves = TokenMoves(spec, factors, place_layers(spec, PAGES, 0), PAGES)
    moves.compile(pool)
    return moves


def random_arrays(dtype: Any, seed: int) -> list[npt.NDArray[Any]]:
    shape = (2 * (PAGES + 1), PAGE, HEADS, DIM)
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape).astype(dtype) for _ in range(2)]


def pool_of(arrays: list[npt.NDArray[Any]]) -> KvPool:
    return KvPool(*(jnp.array(array) for array in arrays))


def turned(
    key: npt.NDArray[Any], delta: int, pairing: RopePairing, layer: int
) -> npt.NDArray[np.float64]:
    """One token's keys [head, dim] turned by a difference of positions, in float64."""
    base, scale, factors = [(10_000.0, 1.0, np.ones(3)), (500.0, 0.25, FACTORS)][layer]
    out = key.astype(np.float64)
    for pair in range(3):
        first, second = (
            (2 * pair, 2 * pair + 1) if pairing is RopePairing.NORM else (pair, pair + 3)
        )
        angle = delta * scale * base ** (-2 * pair / 6) / factors[pair]
        a, b = key[:, first].astype(np.float64), key[:, second].astype(np.float64)
        out[:, first] = a * np.cos(angle) - b * np.sin(angle)
        out[:, second] = a * np.sin(angle) + b * np.cos(angle)
    return out


@pytest.fixture(scope="module")
def moves() -> dict[tuple[RopePairing, str], TokenMoves]:
    return {
        (pairing, dtype): moves_of(spec_of(pairing), pool_of(random_arrays(dtype, 0)))
        for pairing in RopePairing
        for dtype in ("float16", "float32")
    }


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_moved_keys_are_turned_and_values_are_not(
    moves: dict[tuple[RopePairing, str], TokenMoves], data: st.DataObject
) -> None:
    pairing = data.draw(st.sampled_from(list(RopePairing)))
    dtype = data.draw(st.sampled_from(["float16", "float32"]))
    sources = sorted(data.draw(st.sets(st.integers(0, 5 * PAGE - 1), min_size=1)))
    first = data.draw(st.integers(0, sources[0]))
    old = data.draw(st.permutations(range(1, PAGES + 1)))[:5]
    # Some pages are moved within, others into fresh ones.
    fresh = [page_id for page_id in range(1, PAGES + 1) if page_id not in old]
    is_fresh = data.draw(st.lists(st.booleans(), min_size=5, max_size=5))
    new = [fresh[i] if is_fresh[i] else old[i] for i in range(5)]
    keys, values = random_arrays(dtype, 1)
    moved = moves[pairing, dtype].move(pool_of([keys, values]), old, new, first, sources)
    expected_keys, expected_values = keys.astype(np.float64), values.copy()
    for layer in range(2):
        unit = layer * (PAGES + 1)
        for target, source in enumerate(sources, first):
            read = unit + old[source // PAGE], source % PAGE
            write = unit + new[target // PAGE], target % PAGE
            expected_keys[write] = turned(keys[read], target - source, pairing, layer)
            expected_values[write] = values[read]
    is_page = np.arange(len(keys)) % (PAGES + 1) > 0  # sinks may hold anything
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    found = np.asarray(moved.keys, np.float64)[is_page]
    np.testing.assert_allclose(found, expected_keys[is_page], atol=tolerance)
    np.testing.assert_array_equal(np.asarray(moved.values)[is_page], expected_values[is_page])


def test_more_tokens_than_a_call_takes_go_in_pieces() -> None:
    spec = spec_of(RopePairing.NEOX)
    num_pages = 200
    shape = (2 * (num_pages + 1), PAGE, HEADS, DIM)
    draw = np.random.default_rng(3)
    keys, values = (draw.standard_normal(shape).astype(np.float32) for _ in range(2))
    pool = pool_of([keys, values])
    moves = TokenMoves(
        spec, [None, jnp.asarray(FACTORS)], place_layers(spec, num_pages, 0), num_pages
    )
    moves.compile(pool)
    pages = list(range(1, num_pages + 1))
    moved = np.asarray(moves.move(pool, pages, pages, 10, range(37, 790)).values)
    flat, expected = moved[1:201].reshape(-1, HEADS, DIM), values[1:201].reshape(-1, HEADS, DIM)
    np.testing.assert_array_equal(flat[10:763], expected[37:790])
    np.testing.assert_array_equal(flat[:10], expected[:10])


@pytest.mark.parametrize(
    ("pages", "first", "sources", "message"),
    [
        ([1, PAGES + 1], 0, [1], r"page ids 1\.\.13 of a kv pool of 12"),
        ([0, 1], 0, [1], r"page ids 0\.\.1"),
        ([1, 2], 0, [8], r"positions 8\.\.8 of 8"),
        ([1, 2], -1, [1], r"positions -1\.\.-1 of 8"),
        ([1, 2], 3, [2], "moved forward"),
        ([1, 2], 0, [3, 2], "not in order"),
        ([1, 2], 0, [3, 3], "not in order"),
    ],
)
def test_moves_that_would_read_what_they_wrote_are_refused(
    moves: dict[tuple[RopePairing, str], TokenMoves],
    pages: list[int],
    first: int,
    sources: list[int],
    message: str,
) -> None:
    pool = pool_of(random_arrays("float16", 0))
    with pytest.raises(ValueError, match=message):
        moves[RopePairing.NORM, "float16"].move(pool, pages, pages, first, sources)
    assert not pool.keys.is_deleted()


def test_models_with_windows_cannot_move() -> None:
    assert can_move(spec_of(RopePairing.NORM))
    windowed = spec_of(RopePairing.NORM, window=8)
    assert not can_move(windowed)
    with pytest.raises(ValueError, match="tokens of test cannot be moved"):
        TokenMoves(windowed, [None, None], place_layers(windowed, PAGES, 4), PAGES)

"""The choice of experts, on XLA and natively, against the definition one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import native
from engine.model.moe import route
from engine.model.spec import Gating, RouterSpec
from tests.native import requires_native
from tests.numerics.experts import Experts, silu_gated
from tests.unit.engine.jitted import jitted

Float32 = npt.NDArray[np.float32]
Chosen = tuple[npt.NDArray[np.int32], Float32]
Route = Callable[[RouterSpec, Float32, Float32 | None], Chosen]

ROUTERS = [
    RouterSpec(8, 2, Gating.SOFTMAX),
    RouterSpec(8, 2, Gating.SOFTMAX, normalises=True),
    RouterSpec(60, 6, Gating.SOFTMAX, scale=16.0),
    RouterSpec(6, 6, Gating.CHOSEN_SOFTMAX),
    RouterSpec(32, 4, Gating.CHOSEN_SOFTMAX, has_bias=True),
    RouterSpec(16, 3, Gating.SIGMOID, True, 2.5, 4, 2, has_selection_bias=True),
    RouterSpec(256, 8, Gating.SIGMOID, True, 2.5, 8, 4, has_selection_bias=True),
    RouterSpec(12, 1, Gating.SIGMOID),
]


def on_xla(router: RouterSpec, logits: Float32, bias: Float32 | None) -> Chosen:
    ids, weights = jitted(partial(route, router))(
        jnp.asarray(logits), None if bias is None else jnp.asarray(bias)
    )
    return np.asarray(ids), np.asarray(weights)


def natively(router: RouterSpec, logits: Float32, bias: Float32 | None) -> Chosen:
    ids, weights = native.route(
        jnp.asarray(logits),
        None if bias is None else jnp.asarray(bias),
        num_used=router.num_used,
        gating=router.gating.value,
        normalises=router.normalises,
        scale=router.scale,
        num_groups=router.num_groups,
        num_groups_used=router.num_groups_used,
    )
    return np.asarray(ids), np.asarray(weights)


PATHS = [
    pytest.param(on_xla, id="xla"),
    pytest.param(natively, id="native", marks=requires_native),
]


def defined(router: RouterSpec, bias: Float32 | None) -> Experts:
    names = {Gating.SOFTMAX: "softmax", Gating.SIGMOID: "sigmoid", Gating.CHOSEN_SOFTMAX: "chosen"}
    return Experts(
        {} if bias is None else {"exp_probs_b.bias": bias.astype(np.float64)},
        router.num_used,
        names[router.gating],  # pyright: ignore[reportArgumentType] -- the three literals
        router.normalises,
        router.scale,
        router.num_groups,
        router.num_groups_used,
        silu_gated,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("router", ROUTERS, ids=range(len(ROUTERS)))
def test_experts_and_weights_are_those_of_the_definition(path: Route, router: RouterSpec) -> None:
    rng = np.random.default_rng(router.num_experts)
    logits = rng.standard_normal((40, router.num_experts), np.float32) * 2
    bias = None
    if router.has_selection_bias:
        bias = rng.standard_normal(router.num_experts, np.float32) / np.float32(4)
    ids, weights = path(router, logits, bias)
    reference = defined(router, bias)
    for row, own_ids, own_weights in zip(logits, ids, weights, strict=True):
        expected = reference.route(row.astype(np.float64))
        assert own_ids.tolist() == list(expected)
        np.testing.assert_allclose(own_weights, list(expected.values()), rtol=2e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gating", Gating)
def test_of_equal_scores_the_lower_number_wins(path: Route, gating: Gating) -> None:
    logits = np.array([[1, 3, 1, 3, 3, 0, 1, 1]], np.float32)
    ids, weights = path(RouterSpec(8, 5, gating), logits, None)
    assert ids.tolist() == [[1, 3, 4, 0, 2]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3] == weights[0, 4]


@pytest.mark.parametrize("path", PATHS)
def test_of_equal_groups_the_lower_number_wins(path: Route) -> None:
    router = RouterSpec(8, 3, Gating.SIGMOID, num_groups=4, num_groups_used=2)
    logits = np.array([[0, 1, 5, 5, 1, 0, 1, 0]], np.float32)
    assert path(router, logits, None)[0].tolist() == [[2, 3, 1]]


@pytest.mark.parametrize("path", PATHS)
def test_a_sum_of_weights_is_never_divided_by_less_than_a_normal_half(path: Route) -> None:
    router = RouterSpec(4, 2, Gating.SIGMOID, normalises=True)
    _, weights = path(router, np.full((1, 4), -30, np.float32), None)
    np.testing.assert_allclose(weights, 2.0**14 / (1 + np.exp(30)), rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_choose_experts_that_exist(path: Route, value: float) -> None:
    for router in ROUTERS:
        bare = dataclasses.replace(router, has_selection_bias=False)
        logits = np.full((2, router.num_experts), value, np.float32)
        logits[1, 1:] = 0
        ids, _ = path(bare, logits, None)
        for row in ids.tolist():
            assert len(set(row)) == router.num_used
            assert 0 <= min(row) <= max(row) < router.num_experts


@requires_native
def test_a_native_row_is_the_same_whatever_the_others_hold() -> None:
    router = ROUTERS[6]
    logits = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    ids, weights = natively(router, logits, None)
    for n in range(9):
        own_ids, own_weights = natively(router, logits[n : n + 1], None)
        np.testing.assert_array_equal(own_ids[0], ids[n])
        np.testing.assert_array_equal(own_weights[0].view(np.int32), weights[n].view(np.int32))

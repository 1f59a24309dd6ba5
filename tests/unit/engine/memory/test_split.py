"""The split of one budget: against a brute-force search, and case by case."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.errors import BelowFloor, NoSuchPool, TooLarge
from engine.memory.split import (
    Knobs,
    PoolShape,
    PoolSizes,
    SplitShape,
    ceilings,
    check_target,
    first_split,
)
from engine.types import PoolKind

MOST = 7
_SIZES = st.integers(0, MOST)


def _fits(shape: SplitShape, sizes: dict[PoolKind, int]) -> bool:
    """The rule in words, without the module's own sums: everything together is under the limit."""
    total = shape.other_fixed_bytes
    # One unit more of everything that steps write into.
    sinks = {kind: kind is not PoolKind.MOE_CACHE for kind in PoolKind}
    for pool in shape.pools:
        size = sizes[pool.kind]
        if size < pool.floor or (pool.most is not None and size > pool.most):
            return False
        total += (sinks[pool.kind] + size) * pool.unit_bytes
    return total <= shape.limit_bytes


@st.composite
def shapes(draw: st.DrawFn) -> SplitShape:
    kinds = draw(st.lists(st.sampled_from(list(PoolKind)), min_size=1, unique=True))
    pools: list[PoolShape] = []
    for kind in kinds:
        floor = draw(st.integers(1, 3))
        most = draw(st.integers(floor, MOST)) if kind is PoolKind.MOE_CACHE else None
        pools.append(PoolShape(kind, draw(st.integers(1, 5)), floor, most))
    return SplitShape(
        architecture="toy",
        pools=tuple(pools),
        other_fixed_bytes=draw(st.integers(0, 40)),
        limit_bytes=draw(st.integers(0, 120)),
    )


def _sizes(values: dict[PoolKind, int]) -> PoolSizes:
    return PoolSizes(**{kind.value: size for kind, size in values.items()})


@st.composite
def sizes_of(draw: st.DrawFn, shape: SplitShape) -> dict[PoolKind, int]:
    return {pool.kind: draw(_SIZES) for pool in shape.pools}


@given(st.data())
def test_it_accepts_exactly_what_fits_and_refuses_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    current = data.draw(sizes_of(shape))
    target = data.draw(st.dictionaries(st.sampled_from(list(PoolKind)), _SIZES, min_size=1))
    has = {pool.kind: pool for pool in shape.pools}
    asked = partial(check_target, shape, _sizes(current), _sizes(target))
    if missing := [kind for kind in target if kind not in has]:
        with pytest.raises(NoSuchPool) as no_pool:
            asked()
        assert set(no_pool.value.pools) == {kind.value for kind in missing}
        return
    if below := {(k.value, n, has[k].floor) for k, n in target.items() if n < has[k].floor}:
        with pytest.raises(BelowFloor) as low:
            asked()
        assert set(low.value.violations) == below
        return
    resolved = current | target
    # What is not of the target may lie below its floor only if it lay there before.
    relaxed = SplitShape(
        shape.architecture,
        tuple(
            pool if pool.kind in target else PoolShape(pool.kind, pool.unit_bytes, 0, None)
            for pool in shape.pools
        ),
        shape.other_fixed_bytes,
        shape.limit_bytes,
    )
    if not _fits(relaxed, resolved):
        with pytest.raises(TooLarge):
            asked()
        return
    assert dict(asked().sizes.items()) == resolved


@given(st.data())
def test_a_ceiling_is_the_last_size_that_is_accepted(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    current = {pool.kind: pool.floor for pool in shape.pools}
    if not _fits(shape, current):
        return
    for kind, ceiling in ceilings(shape, _sizes(current)).items():
        assert check_target(shape, _sizes(current), _sizes({kind: ceiling}))
        with pytest.raises(TooLarge):
            check_target(shape, _sizes(current), _sizes({kind: ceiling + 1}))


@given(st.data())
def test_a_filled_budget_has_the_most_experts_then_the_most_pages(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    reserve = data.draw(_SIZES)
    wanted = {pool.kind: pool.floor for pool in shape.pools}
    has = {pool.kind: pool for pool in shape.pools}
    free = [k for k in (PoolKind.MOE_CACHE, PoolKind.KV) if k in has]
    best: tuple[int, ...] | None = None
    # The whole limit fits in fewer units than this, since each unit costs a byte or more.
    for values in itertools.product(range(shape.limit_bytes + 1), repeat=len(free)):
        sizes = wanted | dict(zip(free, values, strict=True))
        keeps = PoolKind.KV not in has or sizes[PoolKind.KV] >= reserve
        if keeps and _fits(shape, sizes):
            best = values if best is None else max(best, values)
    knobs = Knobs(kv_reserve=reserve)
    if best is None:
        return
    split = first_split(shape, _sizes(wanted), knobs, fills=True)
    assert dict(split.sizes.items()) == wanted | dict(zip(free, best, strict=True))


def test_what_cannot_fit_is_refused_when_a_budget_is_filled() -> None:
    shape = SplitShape("toy", (PoolShape(PoolKind.KV, 10, 2),), 100, 129)
    with pytest.raises(TooLarge) as refused:
        first_split(shape, PoolSizes(kv=2), Knobs(), fills=True)
    assert refused.value.needed_bytes == 30
    assert refused.value.budget_bytes == 29


def test_an_over_committed_budget_is_negative_and_everything_exceeds_it() -> None:
    kv = PoolShape(PoolKind.KV, 1, 2)
    swa = PoolShape(PoolKind.SWA, 100, 1)
    shape = SplitShape("toy", (kv, swa), other_fixed_bytes=50, limit_bytes=100)
    with pytest.raises(TooLarge) as refused:
        check_target(shape, PoolSizes(kv=2, swa=1), PoolSizes(kv=2))
    assert refused.value.budget_bytes == -150
    assert refused.value.fixed_bytes == 250


def test_a_size_past_every_machine_is_refused_by_arithmetic() -> None:
    shape = SplitShape("toy", (PoolShape(PoolKind.KV, 1 << 20, 2),), 0, 1 << 34)
    with pytest.raises(TooLarge) as refused:
        check_target(shape, PoolSizes(kv=8), PoolSizes(kv=1 << 40))
    assert refused.value.needed_bytes == ((1 << 40) + 1) << 20
    assert refused.value.metadata()["kv"] == str(1 << 40)


def test_window_and_state_pools_are_priced_at_their_target() -> None:
    pools = (PoolShape(PoolKind.KV, 10, 2), PoolShape(PoolKind.SWA, 10, 1))
    shape = SplitShape("toy", pools, 0, 100)
    current = PoolSizes(kv=5, swa=2)
    assert check_target(shape, current, PoolSizes(swa=3)).budget_bytes == 60
    with pytest.raises(TooLarge):
        check_target(shape, current, PoolSizes(swa=4))


def test_experts_have_a_most() -> None:
    shape = SplitShape("toy", (PoolShape(PoolKind.MOE_CACHE, 1, 4, most=8),), 0, 1000)
    with pytest.raises(TooLarge, match="moe_cache: 9 is above 8"):
        check_target(shape, PoolSizes(moe_cache=8), PoolSizes(moe_cache=9))


def test_a_given_size_wins_over_the_split() -> None:
    pools = (PoolShape(PoolKind.KV, 1, 2), PoolShape(PoolKind.MOE_CACHE, 10, 2, most=8))
    shape = SplitShape("toy", pools, 0, 100)
    wanted = PoolSizes(kv=2, moe_cache=8)
    split = first_split(shape, wanted, Knobs(given=PoolSizes(kv=49)), fills=True)
    assert split.sizes == PoolSizes(kv=49, moe_cache=5)
    with pytest.raises(NoSuchPool):
        first_split(shape, wanted, Knobs(given=PoolSizes(mamba=1)), fills=True)

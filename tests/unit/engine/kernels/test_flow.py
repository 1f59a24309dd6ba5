from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from engine.kernels import flow
from tests.unit.engine.jitted import jitted


def sum_between(lower: jax.Array, upper: jax.Array) -> jax.Array:
    return flow.fori_loop(lower, upper, lambda i, total: total + i, jnp.int32(0))


def pick(index: jax.Array) -> jax.Array:
    def next_one(x: jax.Array) -> jax.Array:
        return x + 1

    def tenfold(x: jax.Array) -> jax.Array:
        return x * 10

    return flow.switch(index, [next_one, tenfold], jnp.int32(7))


def sine_alone(x: jax.Array) -> jax.Array:
    return flow.switch(jnp.int32(0), [jnp.sin], x)


def choose(predicate: jax.Array) -> jax.Array:
    return flow.cond(predicate, lambda: jnp.int32(1), lambda: jnp.int32(2))


def test_one_program_loops_as_often_as_its_data_says() -> None:
    loop = jitted(sum_between)
    bounds = [(0, 0), (0, 5), (3, 5), (5, 3)]
    assert [int(loop(jnp.int32(a), jnp.int32(b))) for a, b in bounds] == [0, 10, 7, 0]


def test_a_switch_takes_the_branch_of_its_index() -> None:
    switch = jitted(pick)
    assert [int(switch(jnp.int32(index))) for index in (0, 1)] == [8, 70]


def test_a_switch_of_one_branch_has_no_condition_in_its_program() -> None:
    program = jax.make_jaxpr(sine_alone)(jnp.float32(0))
    assert [equation.primitive.name for equation in program.jaxpr.eqns] == ["sin"]


def test_a_condition_takes_its_branch() -> None:
    cond = jitted(choose)
    assert [int(cond(jnp.bool_(value))) for value in (True, False)] == [1, 2]


def test_a_scan_carries_its_state_over_the_slices() -> None:
    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        return total * 2 + part

    slices = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    np.testing.assert_array_equal(flow.scan(add, jnp.zeros(2), slices), [8, 15])

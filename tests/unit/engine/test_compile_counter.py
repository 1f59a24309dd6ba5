"""Whose compile it was, where several runners live in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from engine.compile_counter import CompileCounter


@pytest.fixture(name="counters")
def _counters():
    counters = CompileCounter(), CompileCounter()
    for one in counters:
        jax.monitoring.register_event_duration_secs_listener(one)
    yield counters
    for one in counters:
        jax.monitoring.unregister_event_duration_listener(one)


def compile_one(size: int) -> None:
    """A program that this process has not compiled yet."""
    shape = jax.ShapeDtypeStruct((size,), jnp.float32)
    jax.jit(partial(jnp.multiply, size)).lower(shape).compile()


def test_what_is_claimed_counts_for_its_owner_alone(
    counters: tuple[CompileCounter, CompileCounter],
):
    old, new = counters
    with new.claiming():
        compile_one(3)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, compile_one, 4).result()
    assert (old.total, new.total) == (0, 2)
    # Nobody expected this one, so nobody may miss it.
    compile_one(5)
    assert (old.total, new.total) == (1, 3)


def test_a_claim_ends_with_its_block(counters: tuple[CompileCounter, CompileCounter]):
    old, new = counters
    with pytest.raises(KeyError), new.claiming():
        raise KeyError
    with old.claiming():
        compile_one(6)
    assert (old.total, new.total) == (1, 0)

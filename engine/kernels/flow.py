"""jax's structured control flow, typed: jax annotates loops and branches as Any.

Source: `jax.lax.fori_loop`, `switch`, `cond` and `scan`, whose meaning is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax import lax

T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")


def fori_loop(
    lower: jax.Array | int,
    upper: jax.Array | int,
    body: Callable[[jax.Array, T], T],
    start: T,
) -> T:
    """Carries `start` through `body(i, carry)` for i in [lower, upper); bounds may be data."""
    return cast(T, lax.fori_loop(lower, upper, body, start))


def switch(index: jax.Array, branches: Sequence[Callable[..., T]], *operands: Any) -> T:
    """Runs the branch that `index` names; a single branch is called directly."""
    if len(branches) == 1:
        return branches[0](*operands)
    return cast(T, lax.switch(index, branches, *operands))


def cond(predicate: jax.Array, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Runs one of two branches; both must return the same shapes."""
    return cast(T, lax.cond(predicate, then, otherwise))


def scan(body: Callable[[T, X], T], start: T, slices: X) -> T:
    """Carries `start` through `body(carry, slice)` over the leading axis of `slices`."""

    def step(carry: T, part: X) -> tuple[T, None]:
        return body(carry, part), None

    carry, _ = lax.scan(step, start, slices)
    return carry


def scan_out(body: Callable[[T, X], tuple[T, Y]], start: T, slices: X) -> tuple[T, Y]:
    """Likewise for a body that returns an output too; outputs are stacked."""
    return lax.scan(body, start, slices)

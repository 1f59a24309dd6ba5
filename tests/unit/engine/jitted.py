"""`jax.jit` with the type of what it compiles, which jax's own annotation loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax

P = ParamSpec("P")
T = TypeVar("T")


def jitted(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Compiles a function; `options` are those of `jax.jit`."""
    return cast(Callable[P, T], jax.jit(function, **options))

"""The arrays that hold all sequences on the device: keys and values by page, states by slot."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import jax.numpy as jnp

from engine.errors import InvalidField
from engine.model.attention import KvPool
from engine.model.place import num_state_units, num_units
from engine.model.spec import ModelSpec
from engine.model.states import StatePool, new_states

_KV_DTYPES = {"f16": jnp.float16, "f32": jnp.float32}

Pools = tuple[KvPool, StatePool | None]
"""Keys and values, and the states of models with recurrent layers."""


@dataclass(frozen=True)
class PoolSizes:
    """Usable pages of the kv and the swa pool and usable states; the sink of each is extra."""

    pages: int
    window_pages: int
    states: int
    page_tokens: int
    kv_dtype: str


def new_pools(spec: ModelSpec, sizes: PoolSizes) -> Pools:
    """Empty pools."""
    return new_pages(spec, sizes), new_states_of(spec, sizes)


def first_pools(spec: ModelSpec, sizes: PoolSizes) -> Pools:
    """Empty pools; that there is no memory for them is the fault of whoever asked for their size.

    Raises:
        InvalidField: There is none.
    """
    shapes = _page_shapes(spec, sizes)
    elements = sum(math.prod(shape) for shape in shapes)
    needed = elements * jnp.dtype(_KV_DTYPES[sizes.kv_dtype]).itemsize
    with _blaming("context_tokens", f"keys and values of {shapes[0][0]} pages need {needed} bytes"):
        pages = new_pages(spec, sizes)
    needed = num_state_units(spec, sizes.states) * (spec.state.nbytes if spec.state else 0)
    with _blaming("mamba_slots", f"{sizes.states} states need {needed} bytes"):
        return pages, new_states_of(spec, sizes)


def _page_shapes(spec: ModelSpec, sizes: PoolSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and of values."""
    kv, units = spec.kv, num_units(spec, sizes.pages, sizes.window_pages)
    lead = (units, sizes.page_tokens, kv.num)
    return (*lead, kv.key_dim), (*lead, kv.value_dim)


def new_pages(spec: ModelSpec, sizes: PoolSizes) -> KvPool:
    """Empty pages."""
    dtype = _KV_DTYPES[sizes.kv_dtype]
    keys, values = (jnp.zeros(shape, dtype) for shape in _page_shapes(spec, sizes))
    return KvPool(keys, values)


def new_states_of(spec: ModelSpec, sizes: PoolSizes) -> StatePool | None:
    """Empty states; None where the model has none."""
    if spec.state is None:
        return None
    return new_states(spec.state, num_state_units(spec, sizes.states))


@contextmanager
def _blaming(field: str, needs: str) -> Generator[None]:
    """Turns what jax raises without memory, which it leaves untyped, into a refusal of a field."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InvalidField(field, f"{needs}, memory is out") from error

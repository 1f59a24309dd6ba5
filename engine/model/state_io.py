"""States between the device and the host, and from state to state: compiled once, for any of them.

Knows the arrays and where layers lie in them, and no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.model.states import StatePool
from engine.step import IntArray, StateContent, StateLayout


@dataclass(frozen=True)
class DeviceState:
    """A gathered state on the device: conv [layer, input, channel], matrix or None."""

    conv: jax.Array
    matrix: jax.Array | None

    def wait(self) -> StateContent:
        """See `engine.step.StateRead`."""
        matrix = None if self.matrix is None else np.asarray(self.matrix)
        return StateContent(np.asarray(self.conv), matrix)


class StateIo:
    """The programs of one runner's states. The arrays themselves stay with the runner."""

    def __init__(self, pool: StatePool, num_layers: int, num_states: int) -> None:
        """`num_states` are usable states."""
        self._num_states = num_states
        self._first_units = np.arange(num_layers, dtype=np.int32) * np.int32(num_states + 1)
        self.layout = StateLayout(
            num_layers=num_layers,
            conv=tuple(pool.conv.shape[1:]),
            matrix=None if pool.matrix is None else tuple(pool.matrix.shape[1:]),
        )
        self._programs: dict[str, Callable[..., Any]] = {}

    def compilations(self, pool: StatePool) -> list[Callable[[], None]]:
        """What is left to do before the first call, one piece of work per program."""
        return [lambda name=name: self._compile(name, pool) for name in ("read", "write", "copy")]

    def _compile(self, name: str, pool: StatePool) -> None:
        layers = jax.ShapeDtypeStruct(self._first_units.shape, jnp.int32)
        content = jax.tree.map(self._content, pool)
        given: dict[str, tuple[Any, ...]] = {
            "read": (_read, (), (layers,)),
            "write": (_write, (0,), (layers, content)),
            "copy": (_copy, (0,), (layers, layers)),
        }
        function, donated, shapes = given[name]
        jitted = jax.jit(function, donate_argnums=donated)
        self._programs[name] = jitted.lower(pool, *shapes).compile()

    def _content(self, array: jax.Array) -> jax.ShapeDtypeStruct:
        """A state's part of an array of the pool."""
        return jax.ShapeDtypeStruct((len(self._first_units), *array.shape[1:]), array.dtype)

    def read(self, pool: StatePool, state_id: int) -> DeviceState:
        """Gathers a state; see `engine.step.PageStore.read_state`."""
        own: StatePool = self._programs["read"](pool, self._units(state_id))
        return DeviceState(own.conv, own.matrix)

    def write(self, pool: StatePool, state_id: int, content: StateContent) -> StatePool:
        """Returns the states with one of them replaced; it takes the given ones."""
        units = self._units(state_id)
        self.layout.check(content)
        given = StatePool(content.conv, content.matrix)  # pyright: ignore[reportArgumentType] -- numpy will do
        written: StatePool = self._programs["write"](pool, units, given)
        # The host's arrays may be read until the program has run.
        written.conv.block_until_ready()
        return written

    def copy(self, pool: StatePool, source: int, target: int) -> StatePool:
        """Returns the states with one copied over another; it takes the given ones."""
        return self._programs["copy"](pool, self._units(source), self._units(target))

    def _units(self, state_id: int) -> IntArray:
        """XLA clips a bad index silently, so it is checked here."""
        if not 1 <= state_id <= self._num_states:
            raise ValueError(f"state {state_id} of {self._num_states}")
        return self._first_units + np.int32(state_id)


def _read(pool: StatePool, units: jax.Array) -> StatePool:
    matrix = None if pool.matrix is None else pool.matrix[units]
    return StatePool(pool.conv[units], matrix)


def _write(pool: StatePool, units: jax.Array, content: StatePool) -> StatePool:
    matrix = pool.matrix
    if matrix is not None and content.matrix is not None:
        matrix = matrix.at[units].set(content.matrix)
    return StatePool(pool.conv.at[units].set(content.conv), matrix)


def _copy(pool: StatePool, sources: jax.Array, targets: jax.Array) -> StatePool:
    return _write(pool, targets, _read(pool, sources))

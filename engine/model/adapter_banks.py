"""The banks of a model: where loaded adapters lie on the device, and how they get there.

A bank holds all places of all layers of one weight. Writing a place is a program compiled before
READY that changes the bank in place, so that loading within the capacity compiles nothing. What a
place holds counts only once its entries say so, which happens last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from engine.adapters.capacity import AdapterCapacity, Shape
from engine.adapters.content import EMBEDDING, NUMBERS, AdapterContent, Pair, as_float32
from engine.adapters.fit import TargetModel
from engine.errors import InvalidField
from engine.kernels.lora import Bank
from engine.model.spec import AttentionSpec, ModelSpec
from engine.model.tensors import block_matrices, global_matrices

_Key = tuple[int, str]
_GLOBAL = -1


class BanksLost(RuntimeError):
    """A failed write took a bank, and with it what all adapters hold there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BankArrays:
    """What programs receive: banks by weight, one mapping per run of equal blocks, and the rest."""

    runs: tuple[Mapping[str, Bank], ...]
    globals: Mapping[str, Bank]


def adapted_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The weights that adapters may change: (rows, cols) by full tensor name, experts in front."""
    shapes = {f"{name}.weight": shape for name, shape in global_matrices(spec).items()}
    for i, layer in enumerate(spec.layers):
        for name, shape in block_matrices(layer.block, spec.width).items():
            # The stacks of latent attention are no experts: llama.cpp adapts none of them.
            if len(shape) == 2 or name.endswith("_exps"):
                shapes[f"blk.{i}.{name}.weight"] = shape
    return shapes


def target_model(spec: ModelSpec) -> TargetModel:
    """What an adapter of this model must fit."""
    mixers = (layer.block.mixer for layer in spec.layers)
    heads = next((m for m in mixers if isinstance(m, AttentionSpec)), None)
    return TargetModel(
        spec.architecture,
        spec.vocab_size,
        adapted_shapes(spec),
        num_layers=spec.num_layers,
        num_heads=heads.num_heads if heads else 0,
        num_kv_heads=heads.num_kv_heads if heads else 0,
    )


class AdapterBanks:
    """Owned by the runner; `arrays` are valid until the next write."""

    def __init__(self, spec: ModelSpec, capacity: AdapterCapacity, *, is_native: bool) -> None:
        """Allocates the banks.

        Raises:
            InvalidField: There is no memory for them.
        """
        self._capacity = capacity
        self._runs = [layers for _, layers in spec.runs()]
        self._is_native = is_native
        self._banks: dict[_Key, Bank] = {}
        self._tables: dict[_Key, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}
        self._programs: dict[tuple[tuple[int, ...], tuple[int, ...]], Callable[..., Any]] = {}
        shapes = {k: shape for k, shape in adapted_shapes(spec).items() if capacity.takes(shape)}
        try:
            for name in global_matrices(spec):
                self._add((_GLOBAL, name), 1, shapes[f"{name}.weight"])
            for run, layers in enumerate(self._runs):
                prefix = f"blk.{layers[0]}."
                for full, shape in shapes.items():
                    if full.startswith(prefix):
                        name = full.removeprefix(prefix).removesuffix(".weight")
                        self._add((run, name), len(layers), shape)
        except RuntimeError as error:  # what jax's own is, which it leaves untyped
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needed = capacity.nbytes(shapes.values())
            raise InvalidField(
                "max_adapters",
                f"banks of {capacity.count} adapters of rank {capacity.bank_rank} need {needed} "
                "bytes, memory is out",
            ) from error

    @property
    def arrays(self) -> BankArrays:
        """What programs receive now."""
        runs: tuple[dict[str, Bank], ...] = tuple({} for _ in self._runs)
        outside: dict[str, Bank] = {}
        for (run, name), bank in self._banks.items():
            (outside if run == _GLOBAL else runs[run])[name] = bank
        return BankArrays(runs, outside)

    def compilations(self) -> list[Callable[[], None]]:
        """The work of compiling every program, one call each."""
        kinds = {
            (array.shape, part.shape): (array, part)
            for bank in self._banks.values()
            for array in (bank.down, bank.up)
            for part in [_part(array, bank.count)]
        }
        return [partial(self._compile, *arrays) for arrays in kinds.values()]

    def write(self, place: int, content: AdapterContent) -> None:
        """Puts an adapter that was checked against this model into a free place.

        Raises:
            BanksLost: The device failed in the middle; the banks are gone.
        """
        placed = {self._locate(name): pair for name, pair in content.pairs.items()}
        by_bank: dict[_Key, dict[int, Pair]] = {}
        for (key, layer), pair in placed.items():
            by_bank.setdefault(key, {})[layer] = pair
        for key, pairs in by_bank.items():
            self._fill(key, place, pairs)
        for key in self._banks:
            self._publish(key, place, by_bank.get(key, {}))

    def clear(self, place: int) -> None:
        """Makes a place change nothing."""
        for key in self._banks:
            self._publish(key, place, {})

    def _add(self, key: _Key, num_layers: int, shape: Shape) -> None:
        *stacked, rows, cols = shape
        count = math.prod(stacked)
        places, rank = self._capacity.count * count, self._capacity.bank_rank
        dtype = jnp.uint32 if self._is_native else jnp.float32
        is_embedding = f"{key[1]}.weight" == EMBEDDING
        widths = (rows, cols) if is_embedding else (cols, rows)
        down, up = (jnp.zeros((num_layers, places, rank * width), dtype) for width in widths)
        entries = np.zeros((num_layers, places), np.int32)
        factors = np.zeros((num_layers, places), np.float32)
        self._tables[key] = entries, factors
        tables = jnp.array(entries), jnp.array(factors)
        self._banks[key] = Bank(down, up, *tables, rows, cols, rank, self._is_native, count)

    def _locate(self, name: str) -> tuple[_Key, int]:
        """The bank of a weight and its layer there."""
        base = name.removesuffix(".weight")
        if not base.startswith("blk."):
            return (_GLOBAL, base), 0
        _, number, own = base.split(".", 2)
        layer = int(number)
        run = next(i for i, layers in enumerate(self._runs) if layer in layers)
        return (run, own), self._runs[run].index(layer)

    def _compile(self, array: jax.Array, part: jax.ShapeDtypeStruct) -> None:
        place = jax.ShapeDtypeStruct((), jnp.int32)
        program = jax.jit(_write, donate_argnums=0).lower(array, part, place).compile()
        self._programs[array.shape, part.shape] = program

    def _fill(self, key: _Key, place: int, pairs: Mapping[int, Pair]) -> None:
        bank = self._banks[key]
        is_embedding = f"{key[1]}.weight" == EMBEDDING
        parts = tuple(
            np.zeros(_part(array, bank.count).shape, array.dtype) for array in (bank.down, bank.up)
        )
        for layer, pair in pairs.items():
            self._lay(parts[0][layer], pair.down, pair, is_embedding=is_embedding)
            self._lay(parts[1][layer], pair.up, pair, is_embedding=False)
        try:
            down = self._changed(bank.down, parts[0], place * bank.count)
            up = self._changed(bank.up, parts[1], place * bank.count)
        except Exception as error:
            raise BanksLost(f"writing an adapter failed: {error}") from error
        self._banks[key] = dataclasses.replace(bank, down=down, up=up)

    def _changed(self, array: jax.Array, part: npt.NDArray[Any], first: int) -> jax.Array:
        return self._programs[array.shape, part.shape](array, part, np.int32(first))

    def _lay(
        self, target: npt.NDArray[Any], values: npt.NDArray[Any], pair: Pair, *, is_embedding: bool
    ) -> None:
        """Lays one half of a pair into its part of a bank, as `Bank` says, a row per expert."""
        count = len(target)
        if self._is_native:
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(count, -1)
            target.view(np.uint8)[:, : raw.shape[1]] = raw
        elif is_embedding:
            wide = target.reshape(values.shape[0], -1)
            wide[:, : pair.rank] = as_float32(values, pair.number)
        else:
            target[:, : values.size // count] = as_float32(values, pair.number).reshape(count, -1)

    def _publish(self, key: _Key, place: int, pairs: Mapping[int, Pair]) -> None:
        entries, factors = self._tables[key]
        count = self._banks[key].count
        own = slice(place * count, (place + 1) * count)
        entries[:, own], factors[:, own] = 0, 0.0
        for layer, pair in pairs.items():
            entries[layer, own] = 4 * pair.rank + NUMBERS.index(pair.number)
            factors[layer, own] = pair.factor
        self._banks[key] = dataclasses.replace(
            self._banks[key], entries=jnp.array(entries), factors=jnp.array(factors)
        )


def _part(array: jax.Array, count: int) -> jax.ShapeDtypeStruct:
    """One place of a bank's array, all layers."""
    return jax.ShapeDtypeStruct((array.shape[0], count, array.shape[2]), array.dtype)


def _write(array: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(array, part, (0, first, 0))

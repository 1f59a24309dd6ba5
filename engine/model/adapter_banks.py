"""The banks of a model: where loaded adapters lie on the device, and how they get there.

A bank holds all places of all layers of one weight. A place is written a few layers at a time, so
that loading within the capacity compiles nothing: banks of native kernels are memory of the process
that programs read where it is, those of XLA are changed in place by programs compiled before READY.
What a place holds counts only once its entries say so, which happens last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
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
from engine.memory.region import Region
from engine.model.spec import AttentionSpec, ModelSpec
from engine.model.tensors import block_matrices, global_matrices

_Key = tuple[int, str]
_GLOBAL = -1
# What one program writes, unless a layer alone has more.
_PIECE_BYTES = 2 << 20


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
        # What native banks alias, by weight and half. No program reads a place while it is written.
        self._memory: dict[tuple[_Key, str], npt.NDArray[np.uint32]] = {}
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
        except (MemoryError, RuntimeError) as error:
            # jax leaves its own untyped.
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
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
        if self._is_native:
            return []
        kinds = {
            (array.shape, part.shape): (array, part)
            for bank in self._banks.values()
            for array in (bank.down, bank.up)
            for part in [_piece(array, bank.count)]
        }
        return [partial(self._compile, *arrays) for arrays in kinds.values()]

    def write(self, place: int, content: AdapterContent) -> Iterator[int]:
        """Puts an adapter that was checked against this model into a free place, piece by piece.

        Yields the bytes of each; steps may run in between.

        Raises:
            BanksLost: The device failed in the middle; the banks are gone.
        """
        placed = {self._locate(name): pair for name, pair in content.pairs.items()}
        by_bank: dict[_Key, dict[int, Pair]] = {}
        for (key, layer), pair in placed.items():
            by_bank.setdefault(key, {})[layer] = pair
        for key, pairs in by_bank.items():
            yield from self._fill(key, place, pairs)
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
        is_embedding = f"{key[1]}.weight" == EMBEDDING
        widths = (rows, cols) if is_embedding else (cols, rows)
        down, up = (
            self._room(key, half, (num_layers, places, rank * width))
            for half, width in zip(("down", "up"), widths, strict=True)
        )
        entries = np.zeros((num_layers, places), np.int32)
        factors = np.zeros((num_layers, places), np.float32)
        self._tables[key] = entries, factors
        tables = _on_device(entries), _on_device(factors)
        self._banks[key] = Bank(down, up, *tables, rows, cols, rank, self._is_native, count)

    def _room(self, key: _Key, half: str, shape: tuple[int, int, int]) -> jax.Array:
        """One half of a bank, empty."""
        if not self._is_native:
            return jnp.zeros(shape, jnp.float32)
        # A region has large pages, where the system has such: a step reads every bank once, and finding
        # small pages takes as long as reading them.
        memory = Region(4 * math.prod(shape)).data.view(np.uint32).reshape(shape)
        memory.fill(0)  # taken now: what is missing is to end the start, not a request
        self._memory[key, half] = memory
        return jax.device_put(memory, may_alias=True)

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
        number = jax.ShapeDtypeStruct((), jnp.int32)
        program = jax.jit(_write, donate_argnums=0).lower(array, part, number, number).compile()
        self._programs[array.shape, part.shape] = program

    def _fill(self, key: _Key, place: int, pairs: Mapping[int, Pair]) -> Iterator[int]:
        for half in ("down", "up"):
            array, count = getattr(self._banks[key], half), self._banks[key].count
            piece = _piece(array, count)
            num_layers, step = array.shape[0], piece.shape[0]
            for start in range(0, num_layers, step):
                # The last piece has as many layers as the others: some are written twice.
                first = min(start, num_layers - step)
                if self._is_native:
                    own = slice(place * count, (place + 1) * count)
                    part = self._memory[key, half][first : first + step, own]
                else:
                    part = np.zeros(piece.shape, piece.dtype)
                for layer in range(first, first + step):
                    if layer in pairs:
                        self._lay(part[layer - first], key, half, pairs[layer])
                if not self._is_native:
                    self._write_piece(key, half, part, first, place)
                yield part.nbytes

    def _write_piece(
        self, key: _Key, half: str, part: npt.NDArray[Any], layer: int, place: int
    ) -> None:
        bank = self._banks[key]
        array = getattr(bank, half)
        try:
            program = self._programs[array.shape, part.shape]
            array = program(array, part, np.int32(layer), np.int32(place * bank.count))
        except Exception as error:
            raise BanksLost(f"writing an adapter failed: {error}") from error
        self._banks[key] = dataclasses.replace(bank, **{half: array})

    def _lay(self, target: npt.NDArray[Any], key: _Key, half: str, pair: Pair) -> None:
        """Lays one half of a pair into its part of a bank, as `Bank` says, a row per expert."""
        values, count = getattr(pair, half), len(target)
        if self._is_native:
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(count, -1)
            target.view(np.uint8)[:, : raw.shape[1]] = raw
        elif half == "down" and f"{key[1]}.weight" == EMBEDDING:
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
            self._banks[key], entries=_on_device(entries), factors=_on_device(factors)
        )


def _on_device(table: npt.NDArray[Any]) -> jax.Array:
    """A copy. `jnp.array` would compile one for each shape."""
    return jax.device_put(table.copy())


def _piece(array: jax.Array, count: int) -> jax.ShapeDtypeStruct:
    """One place of a few layers of a bank's array."""
    num_layers, _, width = array.shape
    own_bytes = count * width * array.dtype.itemsize
    step = min(num_layers, max(1, _PIECE_BYTES // own_bytes))
    return jax.ShapeDtypeStruct((step, count, width), array.dtype)


def _write(array: jax.Array, part: jax.Array, layer: jax.Array, first: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(array, part, (layer, first, 0))

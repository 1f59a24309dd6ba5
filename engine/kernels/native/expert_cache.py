"""An expert store as the native kernels see it: its tables by address, and a way to call it.

A look at the store's tables is all that a hit takes; a miss calls back into `ExpertStore.ensure`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from engine.gguf.layouts import Layout
from engine.kernels import native
from engine.memory.expert_store import ExpertStore

_log = logging.getLogger(__name__)
_LoadExperts = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int64, ctypes.c_int32
)


class _Cache(ctypes.Structure):
    """ExpertCache of expert_cache.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "experts", "slots", "slot_bytes")),
        *((name, ctypes.c_void_p) for name in ("memory", "slot_of", "uses", "clock", "counts")),
        ("load", _LoadExperts),
    )


class NativeExpertCache:
    """Keeps a store known to the kernels, by a number that programs hold, until it is closed."""

    def __init__(self, store: ExpertStore) -> None:
        """Registers a store.

        Raises:
            MemoryError: The kernels have no memory for its entry.
        """
        self._store = store
        self._library = ctypes.CDLL(str(native.LIBRARY))
        shape = store.shape
        self._entry = _Cache(
            shape.num_layers,
            shape.num_experts,
            store.num_slots,
            shape.slot_bytes,
            *(x.ctypes.data for x in (store.slots, store.slot_of, store.uses, store.clock)),
            store.counts.ctypes.data,
            _LoadExperts(self._load),
        )
        self.number: int = self._library.kvarts_open_expert_cache(ctypes.byref(self._entry))
        if not self.number:
            raise MemoryError("no memory for an expert cache's entry")

    def close(self) -> None:
        """Forgets the store: programs that hold its number are refused from now on."""
        self._library.kvarts_close_expert_cache(self.number)

    def _load(self, layer: int, ids: ctypes.Array[ctypes.c_int32], count: int, is_long: int) -> int:
        try:
            self._store.ensure(layer, ids[:count], is_long=bool(is_long))
        except Exception:
            # Nothing may pass through the kernel but the fact: the step fails, and the log says why.
            _log.exception("experts of layer %d could not be loaded", layer)
            return 1
        return 0


def ensure_experts(number: jax.Array, layer: jax.Array, ids: jax.Array) -> jax.Array:
    """Brings a layer's experts into slots and returns those, int32 [N, K].

    Args:
        number: The cache's, int32 scalar; one that was closed is refused.
        layer: int32 scalar, its place among the layers with experts.
        ids: int32 [N, K].
    """
    result = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    call = jax.ffi.ffi_call("kvarts_ensure_experts", result)
    return call(number, layer, ids)


def cached_products(
    number: jax.Array,
    table: jax.Array,
    x: jax.Array,
    slots: jax.Array,
    rows: Sequence[int],
    layouts: Sequence[Layout],
) -> jax.Array:
    """`native.expert_products` from the slots of a cache: `table` has places in a slot."""
    result = jax.ShapeDtypeStruct((slots.size, sum(rows)), jnp.float32)
    call = jax.ffi.ffi_call("kvarts_cached_products", result)
    attributes = {"rows": np.array(rows, np.int64), "layouts": native.described(layouts)}
    return call(number, table, x, slots, **attributes)

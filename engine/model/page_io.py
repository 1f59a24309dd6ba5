"""Pages between the device and the host, and from page to page: compiled once, for any of them.

Each program takes a fixed number of page ids, padded with the sink, so that nothing compiles while
serving and a large state goes in pieces. Knows the pool array and where layers lie in it, and no
sequence: which pages belong together is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from engine.model.attention import KvPool
from engine.model.place import FULL, WINDOW, Place
from engine.step import IntArray, PageContent, PageLayout
from engine.types import PoolKind

# A piece is short beside a prefill chunk, and long enough that its fixed cost does not count.
_PIECE_BYTES = 8 << 20
_MAX_PAGES = 64
_KINDS = {PoolKind.KV: FULL, PoolKind.SWA: WINDOW}


@dataclass(frozen=True)
class DevicePages:
    """Gathered pages on the device: keys and values [layer, page, token, kv_head, dim]."""

    keys: jax.Array
    values: jax.Array
    num_pages: int

    def wait(self) -> PageContent:
        """See `engine.step.PageRead`."""
        return PageContent(self._tokens(self.keys), self._tokens(self.values))

    def _tokens(self, pages: jax.Array) -> npt.NDArray[Any]:
        whole = np.asarray(pages)[:, : self.num_pages]
        return whole.reshape(whole.shape[0], whole.shape[1] * whole.shape[2], *whole.shape[3:])


@dataclass(frozen=True)
class CopiedPages:
    """Pages that are on the host already."""

    content: PageContent

    def wait(self) -> PageContent:
        """See `engine.step.PageRead`."""
        return self.content


class PageIo:
    """The programs of one runner's pools. The pool itself stays with the runner."""

    def __init__(
        self, pool: KvPool, places: Place, sizes: tuple[int, int], *, is_in_host_memory: bool
    ) -> None:
        """`places` has one entry per attention layer; `sizes` are usable pages by kind."""
        self._is_in_host_memory = is_in_host_memory
        kinds, first_units = np.asarray(places.kind), np.asarray(places.first_unit)
        self._first_units = {
            kind: first_units[kinds == index].astype(np.int32) for kind, index in _KINDS.items()
        }
        self._sizes = {kind: sizes[index] for kind, index in _KINDS.items()}
        self._layouts = {
            kind: PageLayout(
                num_layers=len(first_units),
                page_tokens=pool.keys.shape[1],
                key_shape=(pool.keys.shape[2], pool.keys.shape[3]),
                value_shape=(pool.values.shape[2], pool.values.shape[3]),
                dtype=np.dtype(pool.keys.dtype),
            )
            for kind, first_units in self._first_units.items()
        }
        page_bytes = max(x.token_bytes * x.page_tokens for x in self._layouts.values())
        most = max(1, min(_MAX_PAGES, _PIECE_BYTES // max(1, page_bytes)))
        # A power of two, as the pieces of a slot's file are in pages: none is moved for nothing.
        self.transfer_pages = 1 << (most.bit_length() - 1)
        self._programs: dict[tuple[str, PoolKind], Callable[..., Any]] = {}

    def layout(self, kind: PoolKind) -> PageLayout:
        """What a page of a pool holds.

        Raises:
            ValueError: pools of this kind do not hold pages.
        """
        if kind not in self._layouts:
            raise ValueError(f"the pool {kind.value} holds no pages of keys and values")
        return self._layouts[kind]

    def compilations(self, pool: KvPool) -> list[Callable[[], None]]:
        """What is left to do before the first call, one piece of work per program."""
        kinds = [kind for kind, layout in self._layouts.items() if layout.num_layers]
        names = ("write", "copy") if self._is_in_host_memory else ("read", "write", "copy")
        return [
            lambda kind=kind, name=name: self._compile(name, kind, pool)
            for kind in kinds
            for name in names
        ]

    def _compile(self, name: str, kind: PoolKind, pool: KvPool) -> None:
        layers, count = self._first_units[kind].shape, (self.transfer_pages,)
        units = jax.ShapeDtypeStruct(layers, jnp.int32)
        ids = jax.ShapeDtypeStruct(count, jnp.int32)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        given: dict[str, tuple[Any, ...]] = {
            "read": (_read, (), (units, ids)),
            "write": (
                _write,
                (0,),
                (units, ids, *(_pieces(layers + count, x) for x in (pool.keys, pool.values))),
            ),
            "copy": (_copy, (0,), (units, one, one)),
        }
        function, donated, shapes = given[name]
        jitted = jax.jit(function, donate_argnums=donated)
        self._programs[name, kind] = jitted.lower(pool, *shapes).compile()

    def read(
        self, pool: KvPool, kind: PoolKind, page_ids: Sequence[int]
    ) -> DevicePages | CopiedPages:
        """Gathers pages; see `engine.step.PageStore.read_pages`."""
        ids = self._padded_ids(kind, page_ids)
        layout = self.layout(kind)
        if not layout.num_layers:
            empty = (0, len(page_ids), layout.page_tokens)
            shapes = (empty + one for one in (layout.key_shape, layout.value_shape))
            nothing = (jax.device_put(np.zeros(shape, layout.dtype)) for shape in shapes)
            return DevicePages(*nothing, num_pages=len(page_ids))
        if self._is_in_host_memory:
            units = self._first_units[kind][:, None] + ids[: len(page_ids)]
            return CopiedPages(PageContent(_copied(pool.keys, units), _copied(pool.values, units)))
        keys, values = self._programs["read", kind](pool, self._first_units[kind], ids)
        return DevicePages(keys, values, len(page_ids))

    def write(
        self, pool: KvPool, kind: PoolKind, page_ids: Sequence[int], content: PageContent
    ) -> KvPool:
        """Returns the pool with pages filled; it takes the given one."""
        ids = self._padded_ids(kind, page_ids)
        layout = self.layout(kind)
        keys = self._padded(layout, layout.key_shape, content.keys, len(page_ids))
        values = self._padded(layout, layout.value_shape, content.values, len(page_ids))
        if not layout.num_layers:
            return pool
        program = self._programs["write", kind]
        written: KvPool = program(pool, self._first_units[kind], ids, keys, values)
        # The host's arrays may be read until the program has run.
        jax.block_until_ready((written.keys, written.values))
        return written

    def copy(
        self, pool: KvPool, kind: PoolKind, sources: Sequence[int], targets: Sequence[int]
    ) -> KvPool:
        """Returns the pool with pages copied; it takes the given one."""
        if len(sources) != len(targets) or set(sources) & set(targets):
            raise ValueError(f"pages {list(sources)} cannot be copied to {list(targets)}")
        self._check(kind, sources)
        self._check(kind, targets)
        if not self.layout(kind).num_layers:
            return pool
        # One by one: a copy on write is of one page, and padding would be copied like pages.
        for pair in zip(sources, targets, strict=True):
            ids = (np.array([page_id], np.int32) for page_id in pair)
            pool = self._programs["copy", kind](pool, self._first_units[kind], *ids)
        return pool

    def _check(self, kind: PoolKind, page_ids: Sequence[int]) -> None:
        """XLA clips a bad index silently, so they are checked here."""
        size = self._sizes[kind]
        if page_ids and (min(page_ids) < 1 or max(page_ids) > size):
            raise ValueError(
                f"page ids {min(page_ids)}..{max(page_ids)} of a {kind.value} pool of {size}"
            )

    def _padded_ids(self, kind: PoolKind, page_ids: Sequence[int]) -> IntArray:
        """Ids padded with the sink."""
        self._check(kind, page_ids)
        if len(page_ids) > self.transfer_pages:
            raise ValueError(f"{len(page_ids)} pages at once, {self.transfer_pages} are the most")
        ids = np.zeros(self.transfer_pages, np.int32)
        ids[: len(page_ids)] = page_ids
        return ids

    def _padded(
        self,
        layout: PageLayout,
        token_shape: tuple[int, int],
        given: npt.NDArray[Any],
        num_pages: int,
    ) -> npt.NDArray[Any]:
        tokens = given.shape[1] if given.ndim == 4 else -1
        wanted = (layout.num_layers, tokens, *token_shape)
        least = (num_pages - 1) * layout.page_tokens
        is_fit = least < tokens <= num_pages * layout.page_tokens or tokens == num_pages == 0
        if given.shape != wanted or given.dtype != layout.dtype or not is_fit:
            raise ValueError(
                f"content of shape {given.shape} and type {given.dtype} for {num_pages} pages of "
                f"{layout}"
            )
        room = (layout.num_layers, self.transfer_pages * layout.page_tokens, *token_shape)
        padded = np.ascontiguousarray(given)
        if given.shape != room:
            padded = np.zeros(room, layout.dtype)
            padded[:, :tokens] = given
        return padded.reshape(
            layout.num_layers, self.transfer_pages, layout.page_tokens, *token_shape
        )


def _copied(part: jax.Array, units: IntArray) -> npt.NDArray[Any]:
    """Copies units of a pool in host memory [layer, token, kv_head, dim], without a program.

    XLA's gather takes several times as long as copying a page's bytes does. No view of the pool
    may outlive the call: the next program that changes the pool in place would copy all of it.
    """
    part.block_until_ready()
    view = np.from_dlpack(part)  # pyright: ignore[reportArgumentType] -- as jax documents
    copied = np.take(view, units, axis=0)
    # Latent attention keeps values of no components: nothing may be left to infer.
    return copied.reshape(len(units), units.shape[1] * part.shape[1], *part.shape[2:])


def _pieces(lead: tuple[int, ...], part: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*lead, *part.shape[1:]), part.dtype)


def _read(pool: KvPool, first_units: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    units = first_units[:, None] + ids
    return pool.keys[units], pool.values[units]


def _write(
    pool: KvPool, first_units: jax.Array, ids: jax.Array, keys: jax.Array, values: jax.Array
) -> KvPool:
    units = first_units[:, None] + ids
    return KvPool(pool.keys.at[units].set(keys), pool.values.at[units].set(values))


def _copy(pool: KvPool, first_units: jax.Array, sources: jax.Array, targets: jax.Array) -> KvPool:
    return _write(pool, first_units, targets, *_read(pool, first_units, sources))

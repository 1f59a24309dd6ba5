"""The JAX runner: pools on the device, one compiled program per bucket, steps in and logits out.

Shapes are bucketed so that nothing compiles while serving: decode-only steps by number of rows, and
steps with a prefill chunk by chunk size, always with room for every decode row. All programs are
compiled (or read from the compile cache) in `warm_up` and called ahead-of-time afterwards: a shape
outside the buckets is a bug that raises, not a compile. It knows pages as numbers and no request.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
import numpy.typing as npt

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.content import AdapterContent
from engine.compile_counter import CompileCounter
from engine.memory.heap import forget_programs
from engine.model.adapter_banks import AdapterBanks, BankArrays
from engine.model.attention import BLOCK_TOKENS, KvPool
from engine.model.device_pools import Pools, first_pools
from engine.model.spec import ModelSpec
from engine.model.state_io import StateIo
from engine.model.states import StatePool
from engine.model.weights import Weights
from engine.packed_step import Bucket
from engine.pool_programs import LONG_CHUNK, PoolPrograms, RunnerConfig
from engine.step import (
    DeviceSizes,
    FloatArray,
    IntArray,
    PageContent,
    PageLayout,
    PageRead,
    PoolLost,
    RowLogits,
    StateContent,
    StateLayout,
    StateRead,
    StepBatch,
)
from engine.text_programs import TextPrograms
from engine.types import PoolKind


@dataclass(frozen=True)
class _Outputs:
    """What a step sends up: per output row, candidates and totals; `logits` stays on the device."""

    top_ids: IntArray
    top_logits: FloatArray
    log_sum_exp: FloatArray
    is_finite: npt.NDArray[np.bool_]
    logits: jax.Array
    hidden: jax.Array | None


@dataclass
class _DeviceRow:
    """One row of a step's result; the whole row is fetched only when asked for."""

    outputs: _Outputs
    index: int
    vocab_size: int
    _full: FloatArray | None = field(default=None)

    @property
    def is_finite(self) -> bool:
        return bool(self.outputs.is_finite[self.index])

    @property
    def log_sum_exp(self) -> float:
        return float(self.outputs.log_sum_exp[self.index])

    def top(self) -> tuple[IntArray, FloatArray]:
        return self.outputs.top_ids[self.index], self.outputs.top_logits[self.index]

    def at(self, token_ids: IntArray) -> FloatArray:
        return self.full()[token_ids]

    def full(self) -> FloatArray:
        full = self._full
        if full is None:
            full = self._full = np.asarray(self.outputs.logits, np.float32)[self.index]
        return full


@dataclass(frozen=True)
class DeviceStep:
    """A step that was handed to the device; see `engine.step.RunningStep`."""

    results: Callable[[], list[RowLogits | None]]


class JaxRunner:
    """Runs steps of one model. Owned by the engine thread once `warm_up` has returned."""

    def __init__(self, spec: ModelSpec, weights: Weights, config: RunnerConfig) -> None:
        """Allocates the pools.

        Raises:
            ValueError: The page size does not divide the attention block.
            InvalidField: There is no memory for the pools.
        """
        if BLOCK_TOKENS % config.page_tokens:
            raise ValueError(
                f"page_tokens {config.page_tokens} does not divide {BLOCK_TOKENS}, the block of "
                "the attention walk"
            )
        spec = spec.at_context(config.context_tokens)
        experts = weights.experts
        if experts is not None:
            config = replace(config, expert_slots=experts.pool.num_slots)
        self._spec = spec
        self._pool, self._states = first_pools(spec, config.pool_sizes)
        self._weights = weights
        self._banks = _banks(spec, config.adapters, is_native=weights.is_native)
        self._programs = PoolPrograms(spec, weights, config, self._banks)
        self._texts = None
        if spec.encoder is not None:
            self._texts = TextPrograms(
                spec, weights, max_texts=config.max_rows, max_tokens=config.max_chunk
            )
        self._hidden: list[FloatArray] = []
        self._compiles = CompileCounter()
        jax.monitoring.register_event_duration_secs_listener(self._compiles)
        self._stop_counting = weakref.finalize(
            self, jax.monitoring.unregister_event_duration_listener, self._compiles
        )

    @property
    def max_decodes(self) -> int:
        """The most decode rows of one step."""
        return self._config.max_rows

    @property
    def max_chunk(self) -> int:
        """The most tokens of one prefill chunk."""
        return self._config.max_chunk

    @property
    def max_texts(self) -> int:
        """See `engine.step.Runner`."""
        return self._texts.max_texts if self._texts else 0

    @property
    def compiles(self) -> int:
        """Programs compiled for this runner; see `CompileCounter`."""
        return self._compiles.total

    def close(self) -> None:
        """Stops counting compiles, as the end of the object does; the arrays go with it."""
        self._stop_counting()

    def buckets(self) -> list[tuple[int, int]]:
        """Every compiled shape as (decode rows, chunk tokens)."""
        return [(b.rows, b.chunk) for b in self._programs.shapes()]

    def warm_up(self, progress: Callable[[int, int], None] | None = None, workers: int = 2) -> None:
        """Compiles every program and runs the small ones once; see `PoolPrograms.compile`."""
        with self._compiles.claiming():
            for compilation in self._banks.compilations() if self._banks else []:
                compilation()
            if self._texts:
                self._texts.compile(progress)
            self._programs.compile(None if self._texts else progress, workers)
            self._programs.compile_empty()
            self.warm()

    # Other sizes; see `engine.step.Resizable`.

    @property
    def pools(self) -> PoolPrograms:
        """What runs now."""
        return self._programs

    @property
    def fixed_bytes(self) -> int:
        """Bytes of weights, adapter banks and workspace: what no size of a pool changes."""
        workspace = self._texts.workspace_bytes if self._texts else self._programs.workspace_bytes
        return self._array_bytes + workspace

    def fixed_bytes_at(self, sizes: DeviceSizes) -> int:
        """The same at other sizes: compiles the steps that need the most workspace there."""
        if self._texts:
            self._texts.compile()
            return self.fixed_bytes
        programs = self._programs_at(sizes)
        programs.compile_largest()
        return self._array_bytes + programs.workspace_bytes

    @property
    def _array_bytes(self) -> int:
        weights = replace(self._weights, experts=None)
        arrays = jax.tree.leaves((weights, self._banks.arrays if self._banks else None))
        return sum(array.nbytes for array in arrays)

    def prepare(self, sizes: DeviceSizes) -> PoolPrograms:
        """Compiles all programs of other sizes, if they are others."""
        now = self._programs.sizes
        if not self._changes_programs(now, sizes):
            return self._programs.at(sizes)
        programs = self._programs_at(sizes)
        # What was traced for earlier sizes is of no use, and jax would keep it for ever.
        jax.clear_caches()
        programs.compile()
        programs.compile_empty()
        return programs

    def _programs_at(self, sizes: DeviceSizes) -> PoolPrograms:
        weights = self._weights
        if weights.experts is not None:
            planned = weights.experts.pool.planned(sizes.moe_cache)
            weights = weights.with_experts(self._spec, planned, sizes.moe_cache)
        return PoolPrograms(self._spec, weights, self._config.at(sizes), self._banks)

    def _changes_programs(self, now: DeviceSizes, then: DeviceSizes) -> bool:
        """A program knows where pages and states lie, and whether experts are in slots."""
        if now.changes_pages(then) or now.changes_states(then):
            return True
        if self._weights.experts is None:
            return False
        ceiling = self._weights.experts.pool.shape.ceiling
        return (now.moe_cache == ceiling) != (then.moe_cache == ceiling)

    def free_pools(self, target: PoolPrograms) -> None:
        """Frees the arrays that have another size there."""
        now, then = self._programs.sizes, target.sizes
        if now.changes_pages(then):
            _delete(self._pool)
        if now.changes_states(then):
            _delete(self._states)
        experts = self._weights.experts
        if experts is not None and then.moe_cache < experts.pool.num_slots:
            experts.pool.resize(then.moe_cache)

    def release_pools(self) -> None:
        """Frees all arrays."""
        _delete(self._pool)
        _delete(self._states)

    def allocate_pools(self, target: PoolPrograms) -> None:
        """Makes what was freed anew, empty; nothing has changed if there is no memory for it."""
        weights = self._with_experts(target.sizes.moe_cache)
        pages, states = self._pool, self._states
        if _is_deleted(pages):
            pages = target.new_pages()
        if _is_deleted(states):
            states = target.new_states()
        jax.block_until_ready((pages, states))
        self._pool, self._states, self._programs = pages, states, target
        self._weights = weights

    def _with_experts(self, num_slots: int) -> Weights:
        """The weights with as many experts in memory as that."""
        weights = self._weights
        if weights.experts is None:
            return weights
        pool = weights.experts.pool
        if pool.num_slots != num_slots:
            pool.resize(num_slots)
        assert pool.view is not None
        if pool.view is weights.experts:
            return weights
        return weights.with_experts(self._spec, pool.view, num_slots)

    def warm(self) -> None:
        """Runs the programs of short steps once on padding.

        Raises:
            ModelFileError, OSError: An expert that this needed cannot be read.
        """
        try:
            for bucket in self._programs.buckets():
                if bucket.chunk <= LONG_CHUNK:
                    self._call(bucket, self._programs.packed(bucket).pack(StepBatch((), None)))()
        except PoolLost as lost:
            experts = self._weights.experts
            raise (experts and experts.pool.store.failure) or lost from None

    def give_back(self) -> None:
        """See `engine.step.Resizable`."""
        forget_programs()

    @property
    def _config(self) -> RunnerConfig:
        return self._programs.config

    def _bank_arrays(self, bucket: Bucket) -> BankArrays | None:
        return self._banks.arrays if self._banks and bucket.has_adapters else None

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Evaluates a step and waits for it; raises as `start`."""
        return self.start(batch).results()

    def start(self, batch: StepBatch) -> DeviceStep:
        """Begins to evaluate a step; see `engine.step.Runner.start`.

        Raises:
            ValueError: A size, a token, a position or a page is out of range; nothing was run.
            PoolLost: The step failed with the pools in its hands; they are new and empty now.
        """
        if self._texts:
            return DeviceStep(partial(self._read_texts, self._texts, batch))
        bucket = self._bucket_for(batch)
        wait = self._call(bucket, self._programs.packed(bucket).pack(batch))
        return DeviceStep(lambda: self._rows(batch, bucket, wait()))

    def _read_texts(self, texts: TextPrograms, batch: StepBatch) -> list[RowLogits | None]:
        self._hidden = texts.read(batch.texts)
        return [None] * len(batch.texts)

    def _rows(self, batch: StepBatch, bucket: Bucket, outputs: _Outputs) -> list[RowLogits | None]:
        self._hidden = []
        if batch.chunk and outputs.hidden is not None:
            self._hidden = [np.asarray(outputs.hidden)[: len(batch.chunk.tokens)]]
        rows: list[RowLogits | None] = [
            _DeviceRow(outputs, i, self._spec.vocab_size) if work.wants_logits else None
            for i, work in enumerate(batch.decodes)
        ]
        if batch.chunk:
            wanted = batch.chunk.wants_logits
            rows.append(_DeviceRow(outputs, bucket.rows, self._spec.vocab_size) if wanted else None)
        return rows

    def hidden_states(self, text: int = 0) -> FloatArray:
        """See `engine.step.Runner`."""
        assert self._hidden, "the last step asked for no hidden states"
        return self._hidden[text]

    def write_adapter(self, place: int, content: AdapterContent) -> Iterator[int]:
        """See `engine.adapters.store.AdapterStore`."""
        assert self._banks, "an adapter without a place"
        return self._banks.write(place, content)

    def clear_adapter(self, place: int) -> None:
        """See `engine.adapters.store.AdapterStore`."""
        assert self._banks, "an adapter without a place"
        self._banks.clear(place)

    @property
    def transfer_pages(self) -> int:
        """See `engine.step.PageStore`, as for all four of these."""
        return self._programs.page_io.transfer_pages

    def page_layout(self, kind: PoolKind) -> PageLayout:
        """What a page of the kv or the swa pool holds."""
        return self._programs.page_io.layout(kind)

    def read_pages(self, kind: PoolKind, page_ids: Sequence[int]) -> PageRead:
        """Gathers whole pages on the device."""
        return self._programs.page_io.read(self._pool, kind, page_ids)

    def write_pages(self, kind: PoolKind, page_ids: Sequence[int], content: PageContent) -> None:
        """Fills pages from the host."""
        self._change_pages(lambda pool: self._programs.page_io.write(pool, kind, page_ids, content))

    def copy_pages(self, kind: PoolKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole pages on the device."""
        self._change_pages(lambda pool: self._programs.page_io.copy(pool, kind, sources, targets))

    @property
    def can_move_tokens(self) -> bool:
        """Whether this model's tokens can be moved to other positions."""
        return self._programs.moves is not None

    def move_tokens(
        self,
        old_pages: Sequence[int],
        new_pages: Sequence[int],
        first: int,
        sources: Sequence[int],
    ) -> None:
        """See `engine.step.PageStore`."""
        moves = self._programs.moves
        assert moves, "tokens of this model cannot be moved"
        self._change_pages(lambda pool: moves.move(pool, old_pages, new_pages, first, sources))

    @property
    def state_layout(self) -> StateLayout | None:
        """See `engine.step.StateStore`, as for the next three."""
        return self._programs.state_io.layout if self._programs.state_io else None

    def read_state(self, state_id: int) -> StateRead:
        """Gathers a state on the device."""
        programs, states = self._state_programs()
        return programs.read(states, state_id)

    def write_state(self, state_id: int, content: StateContent) -> None:
        """Fills a state from the host."""
        programs, _ = self._state_programs()
        self._change_states(lambda states: programs.write(states, state_id, content))

    def copy_state(self, source: int, target: int) -> None:
        """Copies a state on the device."""
        programs, _ = self._state_programs()
        self._change_states(lambda states: programs.copy(states, source, target))

    def _state_programs(self) -> tuple[StateIo, StatePool]:
        programs = self._programs.state_io
        if programs is None or self._states is None:
            raise ValueError("the model has no recurrent layers")
        return programs, self._states

    def _change_states(self, change: Callable[[StatePool], StatePool]) -> None:
        _, given = self._state_programs()
        try:
            self._states = change(given)
        except Exception as error:
            self._check_pools((self._pool, given), error)
            raise

    def _change_pages(self, change: Callable[[KvPool], KvPool]) -> None:
        given = self._pool
        try:
            self._pool = change(given)
        except Exception as error:
            self._check_pools(given, error)
            raise

    def _check_pools(self, given: KvPool | Pools, error: Exception) -> None:
        """Starts with empty pools again if a failed program took the given ones with it.

        Raises:
            PoolLost: it did.
        """
        if any(array.is_deleted() for array in jax.tree.leaves(given)):
            self._pool, self._states = self._programs.new_pools()
            raise PoolLost(f"a program took the pools with it: {error}") from error

    def _bucket_for(self, batch: StepBatch) -> Bucket:
        if any(len(work.tokens) != 1 for work in batch.decodes):
            raise ValueError("a decode row evaluates one token")
        if batch.chunk and len(batch.chunk.tokens) == 0:
            raise ValueError("a chunk evaluates at least one token")
        chunk = len(batch.chunk.tokens) if batch.chunk else 0
        for bucket in self._programs.shapes():
            fits = len(batch.decodes) <= bucket.rows and chunk <= bucket.chunk
            if fits and (chunk > 0) == (bucket.chunk > 0):
                return Bucket(bucket.rows, bucket.chunk, batch.has_adapters, batch.wants_hidden)
        raise ValueError(
            f"a step of {len(batch.decodes)} rows and a chunk of {chunk} tokens exceeds the "
            f"limits of {self.max_decodes} rows and {self.max_chunk} tokens"
        )

    def _call(self, bucket: Bucket, packed: IntArray) -> Callable[[], _Outputs]:
        """Hands a step to the device; what it returns waits for the end."""
        given = self._pool, self._states
        with self._checking(given):
            (ids, logits, log_sums, finite, full, hidden), pools = self._programs.step(bucket)(
                self._weights, self._bank_arrays(bucket), self._programs.places, given, packed
            )

        def wait() -> _Outputs:
            # Some failures of a program show only here, when its results are waited for.
            with self._checking(given):
                outputs = _Outputs(
                    np.asarray(ids),
                    np.asarray(logits),
                    np.asarray(log_sums),
                    np.asarray(finite),
                    full,
                    hidden,
                )
            self._pool, self._states = pools
            return outputs

        return wait

    @contextmanager
    def _checking(self, given: Pools) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self._check_pools(given, error)
            raise


def _banks(spec: ModelSpec, capacity: AdapterCapacity, *, is_native: bool) -> AdapterBanks | None:
    return AdapterBanks(spec, capacity, is_native=is_native) if capacity.count else None


def _delete(arrays: KvPool | StatePool | None) -> None:
    for array in jax.tree.leaves(arrays):
        array.delete()


def _is_deleted(arrays: KvPool | StatePool | None) -> bool:
    return any(array.is_deleted() for array in jax.tree.leaves(arrays))

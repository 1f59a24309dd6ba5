"""The JAX runner: pools on the device, one compiled program per bucket, steps in and logits out.

Shapes are bucketed so that nothing compiles while serving: decode-only steps by number of rows, and
steps with a prefill chunk by chunk size, always with room for every decode row. All programs are
compiled (or read from the compile cache) in `warm_up` and called ahead-of-time afterwards: a shape
outside the buckets is a bug that raises, not a compile. It knows pages as numbers and no request.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.content import AdapterContent
from engine.kernels import native
from engine.model.adapter_banks import AdapterBanks, BankArrays
from engine.model.attention import BLOCK_TOKENS, KvPool
from engine.model.context import vector
from engine.model.decoder import forward
from engine.model.device_pools import Pools, PoolSizes, first_pools, new_pools
from engine.model.moving import TokenMoves, can_move
from engine.model.page_io import PageIo
from engine.model.place import Place, place_layers
from engine.model.spec import ModelSpec
from engine.model.state_io import StateIo
from engine.model.states import StatePool
from engine.model.weights import Weights
from engine.packed_step import Bucket, PackedStep, StepLimits
from engine.step import (
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
from engine.types import PoolKind

NUM_CANDIDATES = 64
_LANES = 128  # width of the first stage of the candidate search
_CHUNK_BUCKETS = (32, 128, 512, 2048)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

# Candidates (ids, then logits), log-sum-exp, finiteness, all logits, and hidden states or None.
_Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]
_Program = Callable[..., tuple[_Results, Pools]]


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the device side.

    `num_pages` and `num_window_pages` count usable pages of the kv and the swa pool, `num_states`
    usable states of the mamba pool; the sink of each, number 0, is extra. `embeds`: steps may ask
    for hidden states.
    """

    max_rows: int
    max_chunk: int
    context_tokens: int
    num_pages: int
    page_tokens: int
    kv_dtype: str
    num_window_pages: int = 0
    adapters: AdapterCapacity = field(default_factory=AdapterCapacity)
    num_states: int = 0
    embeds: bool = False

    @property
    def pool_sizes(self) -> PoolSizes:
        """What the pools hold."""
        return PoolSizes(
            self.num_pages,
            self.num_window_pages,
            self.num_states,
            self.page_tokens,
            self.kv_dtype,
        )


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


class _CompileCounter:
    """Counts the process's compiles. It knows no runner, or jax's list would keep models alive."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.total += 1


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
        self._spec = spec
        self._pool, self._states = first_pools(spec, config.pool_sizes)
        self._places = place_layers(
            spec, config.num_pages, config.num_window_pages, config.num_states
        )
        self._page_io = PageIo(
            self._pool, self._places, (config.num_pages, config.num_window_pages)
        )
        self._state_io = None
        if self._states is not None:
            self._state_io = StateIo(self._states, spec.num_recurrent_layers, config.num_states)
        self._weights = weights
        self._config = config
        self._moves = self._token_moves()
        self._banks = _banks(spec, config.adapters, is_native=weights.is_native)
        self._limits = _step_limits(spec, config)
        self._programs: dict[Bucket, _Program] = {}
        self._hidden: FloatArray | None = None
        self._compiles = _CompileCounter()
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
    def compiles(self) -> int:
        """Programs compiled in this process since this runner was made."""
        return self._compiles.total

    def close(self) -> None:
        """Stops counting compiles, as the end of the object does; the arrays go with it."""
        self._stop_counting()

    def buckets(self) -> list[tuple[int, int]]:
        """Every compiled shape as (decode rows, chunk tokens)."""
        return [(b.rows, b.chunk) for b in self._buckets()]

    def _buckets(self) -> list[Bucket]:
        rows = _row_buckets(self._config.max_rows)
        chunks = [c for c in _CHUNK_BUCKETS if c < self._config.max_chunk]
        chunks.append(self._config.max_chunk)
        return [Bucket(r, 0) for r in rows] + [Bucket(rows[-1], c) for c in chunks]

    def warm_up(self, progress: Callable[[int, int], None] | None = None, workers: int = 2) -> None:
        """Compiles every bucket and the transfers of pages; runs the small ones once on padding.

        Args:
            progress: Called with (programs ready, programs in all).
            workers: Compilations at a time; tracing holds the interpreter, compiling does not.
        """
        buckets = self._buckets()
        if self._config.embeds:
            buckets += [replace(bucket, has_hidden=True) for bucket in buckets if bucket.chunk]
        if self._banks:
            buckets += [replace(bucket, has_adapters=True) for bucket in buckets]
        work: list[Callable[[], None]] = [partial(self._prepare, bucket) for bucket in buckets]
        work += self._page_io.compilations(self._pool)
        if self._state_io is not None and self._states is not None:
            work += self._state_io.compilations(self._states)
        work += self._banks.compilations() if self._banks else []
        work += [partial(self._moves.compile, self._pool)] if self._moves else []
        with ThreadPoolExecutor(workers) as pool:
            compiling = [pool.submit(one) for one in work]
            for done, compiled in enumerate(compiling, 1):
                compiled.result()
                if progress:
                    progress(done, len(work))
        for bucket in buckets:
            if bucket.chunk > _CHUNK_BUCKETS[0]:
                continue  # a long chunk takes as long on padding as on a prompt
            self._call(bucket, self._packed(bucket).pack(StepBatch((), None)))

    def _packed(self, bucket: Bucket) -> PackedStep:
        return PackedStep(bucket, self._limits)

    def _prepare(self, bucket: Bucket) -> None:
        self._programs[bucket] = self._compile(bucket)

    def _compile(self, bucket: Bucket) -> _Program:
        shape = self._packed(bucket)
        step = partial(_step, self._spec, shape)
        packed = jax.ShapeDtypeStruct((shape.length,), jnp.int32)
        jitted = jax.jit(step, donate_argnums=3)
        banks = self._bank_arrays(bucket)
        pools = self._pool, self._states
        return jitted.lower(self._weights, banks, self._places, pools, packed).compile()

    def _bank_arrays(self, bucket: Bucket) -> BankArrays | None:
        return self._banks.arrays if self._banks and bucket.has_adapters else None

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Evaluates a step; see `engine.step.Runner.run`.

        Raises:
            ValueError: A size, a token, a position or a page is out of range; nothing was run.
            PoolLost: The step failed with the pools in its hands; they are new and empty now.
        """
        bucket = self._bucket_for(batch)
        outputs = self._call(bucket, self._packed(bucket).pack(batch))
        self._hidden = None
        if batch.chunk and outputs.hidden is not None:
            self._hidden = np.asarray(outputs.hidden)[: len(batch.chunk.tokens)]
        rows: list[RowLogits | None] = [
            _DeviceRow(outputs, i, self._spec.vocab_size) if work.wants_logits else None
            for i, work in enumerate(batch.decodes)
        ]
        if batch.chunk:
            wanted = batch.chunk.wants_logits
            rows.append(_DeviceRow(outputs, bucket.rows, self._spec.vocab_size) if wanted else None)
        return rows

    def hidden_states(self) -> FloatArray:
        """See `engine.step.Runner`."""
        assert self._hidden is not None, "the last step asked for no hidden states"
        return self._hidden

    def write_adapter(self, place: int, content: AdapterContent) -> None:
        """See `engine.adapters.store.AdapterStore`."""
        assert self._banks, "an adapter without a place"
        self._banks.write(place, content)

    def clear_adapter(self, place: int) -> None:
        """See `engine.adapters.store.AdapterStore`."""
        assert self._banks, "an adapter without a place"
        self._banks.clear(place)

    @property
    def transfer_pages(self) -> int:
        """See `engine.step.PageStore`, as for all four of these."""
        return self._page_io.transfer_pages

    def page_layout(self, kind: PoolKind) -> PageLayout:
        """What a page of the kv or the swa pool holds."""
        return self._page_io.layout(kind)

    def read_pages(self, kind: PoolKind, page_ids: Sequence[int]) -> PageRead:
        """Gathers whole pages on the device."""
        return self._page_io.read(self._pool, kind, page_ids)

    def write_pages(self, kind: PoolKind, page_ids: Sequence[int], content: PageContent) -> None:
        """Fills pages from the host."""
        self._change_pages(lambda pool: self._page_io.write(pool, kind, page_ids, content))

    def copy_pages(self, kind: PoolKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole pages on the device."""
        self._change_pages(lambda pool: self._page_io.copy(pool, kind, sources, targets))

    @property
    def can_move_tokens(self) -> bool:
        """Whether this model's tokens can be moved to other positions."""
        return self._moves is not None

    def move_tokens(
        self,
        old_pages: Sequence[int],
        new_pages: Sequence[int],
        first: int,
        sources: Sequence[int],
    ) -> None:
        """See `engine.step.PageStore`."""
        moves = self._moves
        assert moves, "tokens of this model cannot be moved"
        self._change_pages(lambda pool: moves.move(pool, old_pages, new_pages, first, sources))

    def _token_moves(self) -> TokenMoves | None:
        spec, given = self._spec, self._weights.globals
        if not can_move(spec):
            return None
        factors = [vector(given, rope.factors) if rope.factors else None for rope in spec.ropes]
        return TokenMoves(spec, factors, self._places, self._config.num_pages)

    @property
    def state_layout(self) -> StateLayout | None:
        """See `engine.step.StateStore`, as for the next three."""
        return self._state_io.layout if self._state_io else None

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
        if self._state_io is None or self._states is None:
            raise ValueError("the model has no recurrent layers")
        return self._state_io, self._states

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
            self._pool, self._states = new_pools(self._spec, self._config.pool_sizes)
            raise PoolLost(f"a program took the pools with it: {error}") from error

    def _bucket_for(self, batch: StepBatch) -> Bucket:
        if any(len(work.tokens) != 1 for work in batch.decodes):
            raise ValueError("a decode row evaluates one token")
        if batch.chunk and len(batch.chunk.tokens) == 0:
            raise ValueError("a chunk evaluates at least one token")
        chunk = len(batch.chunk.tokens) if batch.chunk else 0
        for bucket in self._buckets():
            fits = len(batch.decodes) <= bucket.rows and chunk <= bucket.chunk
            if fits and (chunk > 0) == (bucket.chunk > 0):
                return replace(
                    bucket, has_adapters=batch.has_adapters, has_hidden=batch.wants_hidden
                )
        raise ValueError(
            f"a step of {len(batch.decodes)} rows and a chunk of {chunk} tokens exceeds the "
            f"limits of {self.max_decodes} rows and {self.max_chunk} tokens"
        )

    def _call(self, bucket: Bucket, packed: IntArray) -> _Outputs:
        given = self._pool, self._states
        try:
            (ids, logits, log_sums, finite, full, hidden), pools = self._programs[bucket](
                self._weights, self._bank_arrays(bucket), self._places, given, packed
            )
            # Some failures of a program show only here, when its results are waited for.
            outputs = _Outputs(
                np.asarray(ids),
                np.asarray(logits),
                np.asarray(log_sums),
                np.asarray(finite),
                full,
                hidden,
            )
        except Exception as error:
            self._check_pools(given, error)
            raise
        self._pool, self._states = pools
        return outputs


def _row_buckets(most: int) -> list[int]:
    """1, 2, 4, ... up to and including `most`.

    Measured on native kernels (docs/benchmarks.md): a row of padding costs an eighth of a step of
    one row, a program 0.12 s of processor time at each start.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


def _banks(spec: ModelSpec, capacity: AdapterCapacity, *, is_native: bool) -> AdapterBanks | None:
    return AdapterBanks(spec, capacity, is_native=is_native) if capacity.count else None


def _step_limits(spec: ModelSpec, config: RunnerConfig) -> StepLimits:
    blocks = -(-config.context_tokens // BLOCK_TOKENS)
    sizes = (config.num_pages, config.num_window_pages)
    num_kinds = 1 + bool(spec.num_window_layers) if spec.has_attention else 0
    return StepLimits(
        vocab_size=spec.vocab_size,
        page_tokens=config.page_tokens,
        num_pages=sizes[:num_kinds],
        table_pages=blocks * (BLOCK_TOKENS // config.page_tokens),
        num_adapters=config.adapters.count,
        num_states=config.num_states,
    )


def _step(
    spec: ModelSpec,
    shape: PackedStep,
    weights: Weights,
    banks: BankArrays | None,
    places: Place,
    pools: Pools,
    packed: jax.Array,
) -> tuple[_Results, Pools]:
    step = shape.unpack(packed)
    bucket = shape.bucket
    logits, hidden, pool, states = forward(
        spec, weights, places, *pools, step, bucket.rows, banks, has_hidden=bucket.has_hidden
    )
    ids, best = _candidates(logits)
    if weights.is_native:
        log_sums = native.log_sum_exp(logits)
    else:
        log_sums = jax.nn.logsumexp(logits, axis=-1)
    finite = jnp.isfinite(logits).all(-1)
    return (ids, best, log_sums, finite, logits, hidden), (pool, states)


def _candidates(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best logits of each row with their ids, falling, ties by rising id.

    Two stages, because a top-k over the vocabulary is slow on CPU: the best candidates can only
    lie in the NUM_CANDIDATES groups of neighbours with the largest maxima. Groups are put back in
    id order before the second stage, which keeps ties in id order.
    """
    rows, vocab = logits.shape
    count = min(NUM_CANDIDATES, vocab)
    groups = -(-vocab // _LANES)
    if groups <= count:
        best, ids = lax.top_k(logits, count)
        return ids, best
    padded = jnp.pad(logits, ((0, 0), (0, groups * _LANES - vocab)), constant_values=-jnp.inf)
    grouped = padded.reshape(rows, groups, _LANES)
    _, chosen = lax.top_k(grouped.max(-1), count)
    chosen = jnp.sort(chosen, axis=-1)
    members = jnp.take_along_axis(grouped, chosen[..., None], axis=1).reshape(rows, -1)
    best, places = lax.top_k(members, count)
    group = jnp.take_along_axis(chosen, places // _LANES, axis=1)
    return group * _LANES + places % _LANES, best

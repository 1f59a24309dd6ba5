"""The JAX runner: pools on the device, one compiled program per bucket, steps in and logits out.

Shapes are bucketed so that nothing compiles while serving: decode-only steps by number of rows, and
steps with a prefill chunk by chunk size, always with room for every decode row. All programs are
compiled (or read from the compile cache) in `warm_up` and called ahead-of-time afterwards: a shape
outside the buckets is a bug that raises, not a compile. It knows pages as numbers and no request.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from engine.errors import InvalidField
from engine.model.attention import BLOCK_TOKENS, KvPool
from engine.model.context import StepInputs
from engine.model.decoder import forward
from engine.model.page_io import PageIo
from engine.model.place import FULL, Place, num_state_units, num_units, place_layers
from engine.model.spec import ModelSpec
from engine.model.states import StatePool, new_states
from engine.model.weights import Weights
from engine.step import (
    FloatArray,
    IntArray,
    PageContent,
    PageLayout,
    PageRead,
    PoolLost,
    RowLogits,
    SequenceWork,
    StepBatch,
)
from engine.types import PoolKind

NUM_CANDIDATES = 64
_LANES = 128  # width of the first stage of the candidate search
_CHUNK_BUCKETS = (32, 128, 512, 2048)
_KV_DTYPES = {"f16": jnp.float16, "f32": jnp.float32}
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

# What a program takes and gives back: keys and values, and states where there are recurrent layers.
_Pools = tuple[KvPool, StatePool | None]
_Program = Callable[..., tuple[tuple[jax.Array, ...], _Pools]]


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the device side.

    `num_pages` and `num_window_pages` count usable pages of the kv and the swa pool, `num_states`
    usable states of the mamba pool; the sink of each, number 0, is extra.
    """

    max_rows: int
    max_chunk: int
    context_tokens: int
    num_pages: int
    page_tokens: int
    kv_dtype: str
    num_window_pages: int = 0
    num_states: int = 0


@dataclass(frozen=True, order=True)
class _Bucket:
    """A compiled shape: `rows` decode rows and `chunk` prefill tokens."""

    rows: int
    chunk: int

    @property
    def tokens(self) -> int:
        return self.rows + self.chunk

    @property
    def outputs(self) -> int:
        return self.rows + (1 if self.chunk else 0)


@dataclass(frozen=True)
class _Outputs:
    """What a step sends up: per output row, candidates and totals; `logits` stays on the device."""

    top_ids: IntArray
    top_logits: FloatArray
    log_sum_exp: FloatArray
    is_finite: npt.NDArray[np.bool_]
    logits: jax.Array


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
        self._pool, self._states = _first_pools(spec, config)
        self._places = place_layers(
            spec, config.num_pages, config.num_window_pages, config.num_states
        )
        self._page_io = PageIo(
            self._pool, self._places, (config.num_pages, config.num_window_pages)
        )
        self._num_kinds = _num_kinds(spec)
        self._weights = weights
        self._config = config
        self._table_pages = -(-config.context_tokens // BLOCK_TOKENS) * (
            BLOCK_TOKENS // config.page_tokens
        )
        self._programs: dict[_Bucket, _Program] = {}
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

    def _buckets(self) -> list[_Bucket]:
        rows = _row_buckets(self._config.max_rows)
        chunks = [c for c in _CHUNK_BUCKETS if c < self._config.max_chunk]
        chunks.append(self._config.max_chunk)
        return [_Bucket(r, 0) for r in rows] + [_Bucket(rows[-1], c) for c in chunks]

    def warm_up(self, progress: Callable[[int, int], None] | None = None, workers: int = 2) -> None:
        """Compiles every bucket and the transfers of pages; runs the small ones once on padding.

        Args:
            progress: Called with (programs ready, programs in all).
            workers: Compilations at a time; tracing holds the interpreter, compiling does not.
        """
        buckets = self._buckets()
        work: list[Callable[[], None]] = [partial(self._prepare, bucket) for bucket in buckets]
        work += self._page_io.compilations(self._pool)
        with ThreadPoolExecutor(workers) as pool:
            compiling = [pool.submit(one) for one in work]
            for done, compiled in enumerate(compiling, 1):
                compiled.result()
                if progress:
                    progress(done, len(work))
        for bucket in buckets:
            if bucket.chunk > _CHUNK_BUCKETS[0]:
                continue  # a long chunk takes as long on padding as on a prompt
            self._call(bucket, self._pack(bucket, StepBatch((), None)))

    def _prepare(self, bucket: _Bucket) -> None:
        self._programs[bucket] = self._compile(bucket)

    def _compile(self, bucket: _Bucket) -> _Program:
        shape = _PackedShape(bucket, self._num_kinds, self._table_pages)
        step = partial(_step, self._spec, shape)
        packed = jax.ShapeDtypeStruct((sum(shape.sizes),), jnp.int32)
        jitted = jax.jit(step, donate_argnums=2)
        pools = self._pool, self._states
        return jitted.lower(self._weights, self._places, pools, packed).compile()

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Evaluates a step; see `engine.step.Runner.run`.

        Raises:
            ValueError: A size, a token, a position or a page is out of range; nothing was run.
            PoolLost: The step failed with the pools in its hands; they are new and empty now.
        """
        bucket = self._bucket_for(batch)
        outputs = self._call(bucket, self._pack(bucket, batch))
        rows: list[RowLogits | None] = [
            _DeviceRow(outputs, i, self._spec.vocab_size) if work.wants_logits else None
            for i, work in enumerate(batch.decodes)
        ]
        if batch.chunk:
            wanted = batch.chunk.wants_logits
            rows.append(_DeviceRow(outputs, bucket.rows, self._spec.vocab_size) if wanted else None)
        return rows

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

    def _change_pages(self, change: Callable[[KvPool], KvPool]) -> None:
        given = self._pool
        try:
            self._pool = change(given)
        except Exception as error:
            self._check_pools(given, error)
            raise

    def _check_pools(self, given: KvPool | _Pools, error: Exception) -> None:
        """Starts with empty pools again if a failed program took the given ones with it.

        Raises:
            PoolLost: it did.
        """
        if any(array.is_deleted() for array in jax.tree.leaves(given)):
            self._pool, self._states = _new_pools(self._spec, self._config)
            raise PoolLost(f"a program took the pools with it: {error}") from error

    def _bucket_for(self, batch: StepBatch) -> _Bucket:
        if any(len(work.tokens) != 1 for work in batch.decodes):
            raise ValueError("a decode row evaluates one token")
        if batch.chunk and len(batch.chunk.tokens) == 0:
            raise ValueError("a chunk evaluates at least one token")
        chunk = len(batch.chunk.tokens) if batch.chunk else 0
        for bucket in self._buckets():
            fits = len(batch.decodes) <= bucket.rows and chunk <= bucket.chunk
            if fits and (chunk > 0) == (bucket.chunk > 0):
                return bucket
        raise ValueError(
            f"a step of {len(batch.decodes)} rows and a chunk of {chunk} tokens exceeds the "
            f"limits of {self.max_decodes} rows and {self.max_chunk} tokens"
        )

    def _call(self, bucket: _Bucket, packed: IntArray) -> _Outputs:
        given = self._pool, self._states
        try:
            (ids, logits, log_sums, finite, full), pools = self._programs[bucket](
                self._weights, self._places, given, packed
            )
            # Some failures of a program show only here, when its results are waited for.
            outputs = _Outputs(
                np.asarray(ids), np.asarray(logits), np.asarray(log_sums), np.asarray(finite), full
            )
        except Exception as error:
            self._check_pools(given, error)
            raise
        self._pool, self._states = pools
        return outputs

    def _pack(self, bucket: _Bucket, batch: StepBatch) -> IntArray:
        """One int32 array for the whole step, padding included; `_unpack` is its inverse."""
        page_tokens = self._config.page_tokens
        tokens = np.zeros(bucket.tokens, np.int32)
        positions = np.full(bucket.tokens, -1, np.int32)
        offsets = np.zeros(bucket.tokens, np.int32)
        pages = np.zeros((self._num_kinds, bucket.tokens), np.int32)
        tables = np.zeros((self._num_kinds, bucket.outputs, self._table_pages), np.int32)
        states = np.zeros(bucket.outputs, np.int32)
        outputs = np.arange(bucket.outputs, dtype=np.int32)
        works = list(enumerate(batch.decodes))
        if batch.chunk:
            works.append((bucket.rows, batch.chunk))
            outputs[-1] = bucket.rows + len(batch.chunk.tokens) - 1
        for first, work in works:
            span = slice(first, first + len(work.tokens))
            at = np.arange(work.start, work.start + len(work.tokens), dtype=np.int32)
            tokens[span] = self._checked_tokens(work)
            positions[span] = at
            offsets[span] = at % page_tokens
            states[first] = self._checked_state(work)
            for kind, table in enumerate(self._checked_tables(work)):
                pages[kind, span] = table[at // page_tokens]
                tables[kind, first, : len(table)] = table
        wants = np.array([any(work.wants_logits for _, work in works)], np.int32)
        parts = (tokens, positions, offsets, pages.ravel(), tables.ravel(), states, outputs, wants)
        return np.concatenate(parts)

    def _checked_tokens(self, work: SequenceWork) -> IntArray:
        """Token ids; a bad one would read weights that are not the embedding's."""
        tokens = np.asarray(work.tokens, np.int32)
        if tokens.min() < 0 or tokens.max() >= self._spec.vocab_size:
            raise ValueError(
                f"token ids {tokens.min()}..{tokens.max()} of {self._spec.vocab_size} tokens"
            )
        return tokens

    def _checked_tables(self, work: SequenceWork) -> list[IntArray]:
        """A sequence's page ids by kind; XLA clips a bad index silently, so they are checked."""
        tables = [np.asarray(work.pages, np.int32)]
        if self._num_kinds > 1:
            tables.append(np.asarray(work.window_pages, np.int32))
        end = work.start + len(work.tokens)
        if work.start < 0:
            raise ValueError(f"a first position of {work.start}")
        if end > self._config.context_tokens:
            raise ValueError(f"{end} tokens in a context of {self._config.context_tokens}")
        if not self._num_kinds:
            return []
        limits = (self._config.num_pages, self._config.num_window_pages)
        for kind, (table, limit) in enumerate(zip(tables, limits, strict=False)):
            if len(table) > self._table_pages or len(table) * self._config.page_tokens < end:
                raise ValueError(f"{len(table)} pages for positions up to {end}")
            least = 1 if kind == FULL else 0  # pages behind the window are gone
            if table.size and (table.min() < least or table.max() > limit):
                raise ValueError(f"page ids {table.min()}..{table.max()} of {limit}")
        return tables

    def _checked_state(self, work: SequenceWork) -> int:
        """A sequence's state; of models without a recurrence there is none."""
        if self._states is None:
            return 0
        if not 1 <= work.state_id <= self._config.num_states:
            raise ValueError(f"state {work.state_id} of {self._config.num_states}")
        return work.state_id


def _num_kinds(spec: ModelSpec) -> int:
    """Pools of pages that a step's tables are of: none without attention, two with windows."""
    if spec.attention is None:
        return 0
    return 2 if spec.num_window_layers else 1


def _row_buckets(most: int) -> list[int]:
    """1, 4, 16, ... up to and including `most`: padding rows cost less than programs do."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(4 * sizes[-1], most))
    return sizes


def _pool_shape(spec: ModelSpec, config: RunnerConfig) -> tuple[int, int, int, int]:
    units = num_units(spec, config.num_pages, config.num_window_pages)
    mixer = spec.attention
    if mixer is None:
        return (units, config.page_tokens, 1, 1)
    return (units, config.page_tokens, mixer.num_kv_heads, mixer.head_dim)


def _new_pools(spec: ModelSpec, config: RunnerConfig) -> _Pools:
    return _new_pages(spec, config), _new_states(spec, config)


def _new_pages(spec: ModelSpec, config: RunnerConfig) -> KvPool:
    shape = _pool_shape(spec, config)
    dtype = _KV_DTYPES[config.kv_dtype]
    return KvPool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _new_states(spec: ModelSpec, config: RunnerConfig) -> StatePool | None:
    if spec.state is None:
        return None
    return new_states(spec.state, num_state_units(spec, config.num_states))


def _first_pools(spec: ModelSpec, config: RunnerConfig) -> _Pools:
    """New pools; that there is no memory for them is the fault of whoever asked for their size."""
    shape = _pool_shape(spec, config)
    needed = 2 * math.prod(shape) * jnp.dtype(_KV_DTYPES[config.kv_dtype]).itemsize
    with _blaming("context_tokens", f"keys and values of {shape[0]} pages need {needed} bytes"):
        pages = _new_pages(spec, config)
    needed = num_state_units(spec, config.num_states) * (spec.state.nbytes if spec.state else 0)
    with _blaming("mamba_slots", f"{config.num_states} states need {needed} bytes"):
        return pages, _new_states(spec, config)


@contextmanager
def _blaming(field: str, needs: str) -> Generator[None]:
    """Turns what jax raises without memory, which it leaves untyped, into a refusal of a field."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InvalidField(field, f"{needs}, memory is out") from error


@dataclass(frozen=True)
class _PackedShape:
    """How the parts of a step lie in its packed array."""

    bucket: _Bucket
    num_kinds: int
    table_pages: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of tokens, positions, offsets, pages, tables, states, outputs, the logits flag."""
        tokens, outputs = self.bucket.tokens, self.bucket.outputs
        tables = self.num_kinds * outputs * self.table_pages
        return (tokens, tokens, tokens, self.num_kinds * tokens, tables, outputs, outputs, 1)


def _unpack(shape: _PackedShape, packed: jax.Array) -> StepInputs:
    tokens, positions, offsets, pages, tables, states, outputs, wants = jnp.split(
        packed, np.cumsum(shape.sizes)[:-1]
    )
    return StepInputs(
        tokens=tokens,
        positions=positions,
        offsets=offsets,
        pages=pages.reshape(shape.num_kinds, -1),
        tables=tables.reshape(shape.num_kinds, shape.bucket.outputs, shape.table_pages),
        states=states,
        outputs=outputs,
        wants_logits=wants[0],
    )


def _step(
    spec: ModelSpec,
    shape: _PackedShape,
    weights: Weights,
    places: Place,
    pools: _Pools,
    packed: jax.Array,
) -> tuple[tuple[jax.Array, ...], _Pools]:
    step = _unpack(shape, packed)
    logits, pool, states = forward(spec, weights, places, *pools, step, shape.bucket.rows)
    ids, best = _candidates(logits)
    log_sums = jax.nn.logsumexp(logits, axis=-1)
    finite = jnp.isfinite(logits).all(-1)
    return (ids, best, log_sums, finite, logits), (pool, states)


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

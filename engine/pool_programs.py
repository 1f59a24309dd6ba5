"""All programs of one set of pool sizes: compiled together, and replaced together.

A program knows where each layer's pages lie, so other sizes need other programs. These are made
while the old ones serve; the arrays themselves stay with the runner.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from engine.adapters.capacity import AdapterCapacity
from engine.kernels import native
from engine.memory.allocator import trim
from engine.model.adapter_banks import AdapterBanks, BankArrays
from engine.model.attention import BLOCK_TOKENS, KvPool
from engine.model.context import vector
from engine.model.decoder import forward
from engine.model.device_pools import Pools, PoolSizes, new_pages, new_pools, new_states_of
from engine.model.moving import TokenMoves, can_move
from engine.model.page_io import PageIo
from engine.model.place import Place, place_layers
from engine.model.spec import ModelSpec
from engine.model.state_io import StateIo
from engine.model.states import StatePool
from engine.model.weights import Weights
from engine.packed_step import Bucket, PackedStep, StepLimits
from engine.step import DeviceSizes

NUM_CANDIDATES = 64
LONG_CHUNK = 32
"""Without native kernels a longer chunk takes as long on padding as on a prompt."""
_LANES = 128  # width of the first stage of the candidate search
_CHUNK_BUCKETS = (LONG_CHUNK, 128, 512, 2048)

# Candidates (ids, then logits), log-sum-exp, finiteness, all logits, and hidden states or None.
_Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]
Program = Callable[..., tuple[_Results, Pools]]


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the device side.

    `num_pages` and `num_window_pages` count usable pages of the kv and the swa pool, `num_states`
    usable states of the mamba pool; the sink of each, number 0, is extra. `expert_slots` are the
    experts in memory. `embeds`: steps may ask for hidden states.
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
    expert_slots: int = 0

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

    @property
    def device_sizes(self) -> DeviceSizes:
        """The same, as a rebuild gives them."""
        return DeviceSizes(
            self.num_pages, self.num_window_pages, self.num_states, self.expert_slots
        )

    def at(self, sizes: DeviceSizes) -> RunnerConfig:
        """The same with pools of other sizes."""
        return replace(
            self,
            num_pages=sizes.kv,
            num_window_pages=sizes.swa,
            num_states=sizes.mamba,
            expert_slots=sizes.moe_cache,
        )


class PoolPrograms:
    """What runs on pools of one set of sizes."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, config: RunnerConfig, banks: AdapterBanks | None
    ) -> None:
        """Compiles nothing yet, and allocates no pool.

        Of `weights` only the shapes are looked at, so that no array lives as long as this.
        """
        self.config = config
        self.places = place_layers(
            spec, config.num_pages, config.num_window_pages, config.num_states
        )
        self._shapes: Pools = jax.eval_shape(partial(new_pools, spec, config.pool_sizes))
        pages, states = self._shapes
        self.page_io = PageIo(
            pages,
            self.places,
            (config.num_pages, config.num_window_pages),
            is_in_host_memory=jax.default_backend() == "cpu",
        )
        self.state_io = None
        if states is not None:
            self.state_io = StateIo(states, spec.num_recurrent_layers, config.num_states)
        self.moves = _token_moves(spec, weights, self.places, config.num_pages)
        self._spec = spec
        self._weights = jax.tree.map(_shape_of, weights)
        self._banks = banks
        self._limits = _step_limits(spec, config)
        self._steps: dict[Bucket, Program] = {}
        self._empty: tuple[Callable[[], KvPool], Callable[[], StatePool | None]] | None = None
        self._step_shapes = () if spec.encoder is not None else tuple(_step_shapes(config))

    @property
    def sizes(self) -> DeviceSizes:
        """The sizes that these are for."""
        return self.config.device_sizes

    def at(self, sizes: DeviceSizes) -> PoolPrograms:
        """The same programs under other sizes, which differ in nothing that they know."""
        other = copy.copy(self)
        other.config = self.config.at(sizes)
        return other

    def shapes(self) -> Sequence[Bucket]:
        """Every shape of a step, adapters and hidden states aside; an encoder's have other ones."""
        return self._step_shapes

    def buckets(self) -> list[Bucket]:
        """Every step that is compiled."""
        buckets = list(self.shapes())
        if self.config.embeds:
            buckets += [replace(bucket, has_hidden=True) for bucket in buckets if bucket.chunk]
        if self._banks:
            buckets += [replace(bucket, has_adapters=True) for bucket in buckets]
        return buckets

    def compile(self, progress: Callable[[int, int], None] | None = None, workers: int = 2) -> None:
        """Compiles everything; any thread may call it.

        Args:
            progress: Called with (programs ready, programs in all).
            workers: Compilations at a time; tracing holds the interpreter, compiling does not.
        """
        pages, states = self._shapes
        work: list[Callable[[], None]] = [partial(self._compile, one) for one in self.buckets()]
        work += self.page_io.compilations(pages)
        if self.state_io is not None and states is not None:
            work += self.state_io.compilations(states)
        work += [partial(self.moves.compile, pages)] if self.moves else []
        with ThreadPoolExecutor(workers) as pool:
            compiling = [pool.submit(copy_context().run, one) for one in work]
            for done, compiled in enumerate(compiling, 1):
                compiled.result()
                trim()  # what one compilation took, the next one takes anew
                if progress:
                    progress(done, len(work))

    def compile_largest(self) -> None:
        """Compiles the steps among which the one is that needs the most workspace.

        Those with the longest chunk, and decodes of one row and of all: XLA may copy a pool in one
        kind of step and not in the other.
        """
        buckets = self.buckets()
        longest = max(bucket.chunk for bucket in buckets)
        rows = {1, self.config.max_rows}
        for bucket in buckets:
            if bucket.chunk == longest or (not bucket.chunk and bucket.rows in rows):
                self._compile(bucket)

    def packed(self, bucket: Bucket) -> PackedStep:
        """How a step of a bucket is packed."""
        return PackedStep(bucket, self._limits)

    def step(self, bucket: Bucket) -> Program:
        """The program of a bucket."""
        return self._steps[bucket]

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the largest step needs beside its arguments."""
        programs: list[Any] = list(self._steps.values())
        return max(program.memory_analysis().temp_size_in_bytes for program in programs)

    def compile_empty(self) -> tuple[Callable[[], KvPool], Callable[[], StatePool | None]]:
        """Compiles what makes empty pools, so that nothing does while they are replaced."""
        if self._empty is None:
            given = self._spec, self.config.pool_sizes
            self._empty = (
                jax.jit(partial(new_pages, *given)).lower().compile(),
                jax.jit(partial(new_states_of, *given)).lower().compile(),
            )
        return self._empty

    def new_pages(self) -> KvPool:
        """Empty pages of these sizes."""
        return self.compile_empty()[0]()

    def new_states(self) -> StatePool | None:
        """Empty states of these sizes; None where the model has none."""
        return self.compile_empty()[1]()

    def new_pools(self) -> Pools:
        """Empty pools of these sizes."""
        return self.new_pages(), self.new_states()

    def _compile(self, bucket: Bucket) -> None:
        shape = self.packed(bucket)
        step = partial(_step, self._spec, shape)
        packed = jax.ShapeDtypeStruct((shape.length,), jnp.int32)
        jitted = jax.jit(step, donate_argnums=3)
        banks = None
        if self._banks and bucket.has_adapters:
            # The arrays themselves may be taken by a write meanwhile.
            banks = jax.tree.map(_shape_of, self._banks.arrays)
        given = self._weights, banks, self.places, self._shapes, packed
        self._steps[bucket] = jitted.lower(*given).compile()


def _step_shapes(config: RunnerConfig) -> list[Bucket]:
    rows = _row_buckets(config.max_rows)
    chunks = [c for c in _CHUNK_BUCKETS if c < config.max_chunk]
    chunks.append(config.max_chunk)
    return [Bucket(r, 0) for r in rows] + [Bucket(rows[-1], c) for c in chunks]


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _token_moves(
    spec: ModelSpec, weights: Weights, places: Place, num_pages: int
) -> TokenMoves | None:
    if not can_move(spec):
        return None
    given = weights.globals
    factors = [vector(given, rope.factors) if rope.factors else None for rope in spec.ropes]
    return TokenMoves(spec, factors, places, num_pages)


def _row_buckets(most: int) -> list[int]:
    """1, 2, 4, ... up to and including `most`.

    Measured on native kernels (docs/benchmarks.md): a row of padding costs a tenth of a step of one
    row, a program 0.12 s of processor time at each start.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


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

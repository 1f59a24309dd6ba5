"""What one step computes, as plain data: the seam between the scheduler and whatever runs it.

The scheduler plans a `StepBatch`; a `Runner` evaluates it and returns the logits that were asked
for. The JAX runner and the fake one of the tests both stand behind these types, so this module
must not import either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.types import PoolKind

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class PoolLost(RuntimeError):
    """A step failed and took the content of every page with it; the runner has empty pools again."""


@dataclass(frozen=True)
class SequenceWork:
    """The tokens of one sequence to evaluate in this step.

    `tokens` go to positions `start .. start + len(tokens) - 1`; `pages` are the ids of the KV
    pages that cover positions 0 .. end, in order, and hold everything before `start`.
    `window_pages` are the same of the swa pool, with 0 for pages that lie behind the window; empty
    for models without sliding-window layers. `state_id` is the state of its recurrent layers, 0 for
    models without: it holds everything before `start`, or anything if `start` is 0, and after the
    step everything before its end. `wants_logits` asks for the logits after the last token.
    `adapters` are (place in the banks, scale), added in this order; no place is twice.
    `wants_hidden` asks a chunk for the final hidden state of each of its tokens (`Runner.hidden_states`).
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool
    window_pages: Sequence[int] = ()
    adapters: Sequence[tuple[int, float]] = ()
    state_id: int = 0
    wants_hidden: bool = False

    def one_by_one(self) -> list[SequenceWork]:
        """The same as works of one token each, for one step: the last has the logits.

        A step stores all its keys and values before any of its tokens reads them, so that each
        finds those before it. A state has no such order.
        """
        last = len(self.tokens) - 1
        return [
            replace(
                self,
                tokens=(token,),
                start=self.start + i,
                wants_logits=self.wants_logits and i == last,
            )
            for i, token in enumerate(self.tokens)
        ]


@dataclass(frozen=True)
class StepBatch:
    """One step: `decodes` of one token each, and at most one prefill `chunk` beside them.

    Several decodes may be consecutive tokens of one sequence without a state.

    An encoder's steps have whole `texts` and nothing else.
    """

    decodes: tuple[SequenceWork, ...]
    chunk: SequenceWork | None
    texts: tuple[SequenceWork, ...] = ()

    @property
    def works(self) -> tuple[SequenceWork, ...]:
        """Everything, in the order of the runner's results."""
        chunk = (self.chunk,) if self.chunk else ()
        return (*self.decodes, *chunk, *self.texts)

    @property
    def num_tokens(self) -> int:
        """Tokens evaluated by the step."""
        return sum(len(work.tokens) for work in self.works)

    @property
    def has_adapters(self) -> bool:
        """Whether any sequence runs with an adapter."""
        return any(work.adapters for work in self.works)

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states are asked for."""
        return self.chunk is not None and self.chunk.wants_hidden


class RowLogits(Protocol):
    """The logits of one row, raw (before any bias, penalty or sampler), as float32.

    `top` is what the device sends up unasked; the rest may cost a transfer.
    """

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    @property
    def is_finite(self) -> bool:
        """False if any logit is NaN or infinite: the caller fails that request alone."""
        ...

    @property
    def log_sum_exp(self) -> float:
        """Natural log of the sum of exp over all logits."""
        ...

    def top(self) -> tuple[IntArray, FloatArray]:
        """The best candidates (ids, logits), sorted by falling logit, ties by rising id.

        At least min(vocab_size, 64) of them.
        """
        ...

    def at(self, token_ids: IntArray) -> FloatArray:
        """The logits of some ids."""
        ...

    def full(self) -> FloatArray:
        """All logits, in id order, read-only."""
        ...


@dataclass(frozen=True)
class PageLayout:
    """What one page of a pool holds: `num_layers` x `page_tokens` keys and values.

    `key_shape` and `value_shape` are (heads, dim) of one token in one layer. `num_layers` may be 0.
    """

    num_layers: int
    page_tokens: int
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: np.dtype[Any]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers of the pool."""
        (heads, dim), (value_heads, value_dim) = self.key_shape, self.value_shape
        return self.num_layers * (heads * dim + value_heads * value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageContent:
    """Keys and values of consecutive tokens, canonical: [layer, token, kv_head, dim].

    Layers are those of one pool, in the model's order. Keys are rotated by their positions.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]

    @property
    def num_tokens(self) -> int:
        """Tokens along the second axis."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class StateContent:
    """A sequence's recurrent state, canonical: layers in the model's order, all float32.

    `conv` is [layer, input, channel], the oldest input first; `matrix` [layer, head, row, col], None
    in models without.
    """

    conv: FloatArray
    matrix: FloatArray | None


@dataclass(frozen=True)
class StateLayout:
    """The shape of a state: `conv` and `matrix` are those of one layer."""

    num_layers: int
    conv: tuple[int, ...]
    matrix: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes of a state over all layers."""
        matrix = 0 if self.matrix is None else math.prod(self.matrix)
        return 4 * self.num_layers * (math.prod(self.conv) + matrix)

    def check(self, content: StateContent) -> None:
        """Checks content that somebody else made.

        Raises:
            ValueError: Its shape or type is not this one's.
        """
        pairs = ((self.conv, content.conv), (self.matrix, content.matrix))
        for shape, array in pairs:
            wanted = None if shape is None else (self.num_layers, *shape)
            given = None if array is None else array.shape
            if given != wanted or (array is not None and array.dtype != np.float32):
                dtype = "nothing" if array is None else array.dtype
                raise ValueError(f"a state of shape {given} and type {dtype}, expected {wanted}")


class StateRead(Protocol):
    """A state that was gathered on the device and is on its way to the host."""

    def wait(self) -> StateContent:
        """See `PageRead.wait`."""
        ...


class PageRead(Protocol):
    """Pages that were gathered on the device and are on their way to the host."""

    def wait(self) -> PageContent:
        """Copies them to the host; any thread may call it, later steps change nothing in it.

        Raises whatever the device raises.
        """
        ...


class PageStore(Protocol):
    """The pages of the device as content. Owned by the engine thread, called between steps only.

    Page ids are those of the pool, 1 and up. Nothing compiles in any of these calls.
    """

    @property
    def transfer_pages(self) -> int:
        """The most pages of one read or write, so that a large state goes in pieces."""
        ...

    def page_layout(self, kind: PoolKind) -> PageLayout:
        """What a page of the kv or the swa pool holds."""
        ...

    def read_pages(self, kind: PoolKind, page_ids: Sequence[int]) -> PageRead:
        """Gathers whole pages, in this order, as they are after all earlier calls.

        Raises:
            ValueError: an id is outside the pool, or there are too many.
        """
        ...

    def write_pages(self, kind: PoolKind, page_ids: Sequence[int], content: PageContent) -> None:
        """Fills pages, in this order; of the last one what `content` lacks becomes 0.

        The arrays may be reused when the call returns.

        Raises:
            ValueError: an id is outside the pool, there are too many, or the content's layers,
                heads, type or length is not theirs; nothing was written.
            PoolLost: as `Runner.run`.
        """
        ...

    def copy_pages(self, kind: PoolKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole pages on the device; no target is also a source.

        Raises:
            ValueError: an id is outside the pool, or the lists do not fit each other.
            PoolLost: as `Runner.run`.
        """
        ...

    @property
    def can_move_tokens(self) -> bool:
        """Whether `move_tokens` may be called: a fact of the model."""
        ...

    def move_tokens(
        self,
        old_pages: Sequence[int],
        new_pages: Sequence[int],
        first: int,
        sources: Sequence[int],
    ) -> None:
        """Puts tokens of the kv pool at other positions and turns their keys by the difference.

        The token at position `sources[i]` of the sequence in `old_pages` goes to position
        `first + i` of the one in `new_pages`. Sources rise and no token goes up, so that a sequence
        may be moved within its own pages.

        Raises:
            ValueError: an id or a position is outside its pages, or the sources are not so.
            PoolLost: as `Runner.run`.
        """
        ...


class StateStore(Protocol):
    """The states of recurrent layers. As `PageStore`; state ids are those of the pool, from 1."""

    @property
    def state_layout(self) -> StateLayout | None:
        """What a state holds; None in models without recurrent layers."""
        ...

    def read_state(self, state_id: int) -> StateRead:
        """Gathers a state as it is after all earlier calls.

        Raises:
            ValueError: the id is outside the pool.
        """
        ...

    def write_state(self, state_id: int, content: StateContent) -> None:
        """Replaces a state. The arrays may be reused when the call returns.

        Raises:
            ValueError: the id is outside the pool, or the content does not fit; nothing was written.
            PoolLost: as `Runner.run`.
        """
        ...

    def copy_state(self, source: int, target: int) -> None:
        """Copies a state over another on the device.

        Raises:
            ValueError: an id is outside the pool.
            PoolLost: as `Runner.run`.
        """
        ...


class DeviceStore(PageStore, StateStore, Protocol):
    """All that sequences hold on the device, as content."""


@dataclass(frozen=True)
class DeviceSizes:
    """Usable pages of the kv and the swa pool, states of the mamba pool and experts in memory.

    0 where there is no such pool.
    """

    kv: int
    swa: int = 0
    mamba: int = 0
    moe_cache: int = 0

    def changes_pages(self, other: DeviceSizes) -> bool:
        """Whether pages lie elsewhere there: both kinds share their arrays."""
        return (self.kv, self.swa) != (other.kv, other.swa)

    def changes_states(self, other: DeviceSizes) -> bool:
        """Whether states do."""
        return self.mamba != other.mamba


class PreparedPools(Protocol):
    """All that pools of these sizes need to be run on, compiled."""

    @property
    def sizes(self) -> DeviceSizes:
        """The sizes."""
        ...


class Resizable(Protocol):
    """Pools of other sizes: `prepare`, then `free_pools`, `allocate_pools` and `warm`.

    All but `prepare` are for the engine thread. Each of them may be called again after one failed,
    with the old or the new sizes: what is allocated is what the last good call says.
    """

    @property
    def pools(self) -> Any:
        """What runs now: a `PreparedPools`, to go back to."""
        ...

    def prepare(self, sizes: DeviceSizes) -> Any:
        """Returns the `PreparedPools` of other sizes; any thread may call it, while steps run."""
        ...

    def free_pools(self, target: Any) -> None:
        """Frees the pools that have another size there; what they held is lost.

        Pages of both kinds share their arrays, so they go together. Of experts those are kept that
        still fit, and what a larger pool will hold is kept whole.
        """
        ...

    def release_pools(self) -> None:
        """Frees all pools; `allocate_pools` makes them anew, and until then no step may run."""
        ...

    def allocate_pools(self, target: Any) -> None:
        """Makes what was freed anew, empty, and goes over to the sizes of `target`.

        Raises whatever the device raises; then nothing has changed.
        """
        ...

    def warm(self) -> None:
        """Runs programs once on padding."""
        ...

    def give_back(self) -> None:
        """Returns host memory to the system that compilations and earlier sizes have left."""
        ...


class RunningStep(Protocol):
    """A step that the device may still compute."""

    def results(self) -> list[RowLogits | None]:
        """Waits for the end; one entry per decode, then for the chunk, or one per text.

        An entry is None where no logits were asked for. Raises whatever the device raises; the
        caller then fails the requests of this batch and no others. To be called once.

        Raises:
            PoolLost: the step failed and no page of any sequence holds anything any more. The
                runner can go on.
        """
        ...


class Runner(DeviceStore, Resizable, Protocol):
    """Evaluates steps. Owned by the engine thread; nothing else may call it after `warm_up`."""

    @property
    def max_decodes(self) -> int:
        """The most decode rows of one step."""
        ...

    @property
    def max_chunk(self) -> int:
        """The most tokens of one prefill chunk."""
        ...

    @property
    def max_texts(self) -> int:
        """The most texts of one step, together no longer than a chunk; 0 if it is no encoder."""
        ...

    @property
    def compiles(self) -> int:
        """Programs compiled so far; flat after `warm_up`."""
        ...

    def start(self, batch: StepBatch) -> RunningStep:
        """Begins to evaluate a step and returns before the device is through, where it can.

        Raises as `RunningStep.results`. Nothing else may be asked of the runner until the results
        were.
        """
        ...

    def hidden_states(self, text: int = 0) -> FloatArray:
        """The hidden states after the last norm of the last step's chunk, f32 [tokens, width].

        Only after a step whose chunk asked for them; or those of one of its texts, by number.
        """
        ...

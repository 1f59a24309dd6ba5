"""A step as one array of integers: sent to the device in one piece, and taken apart there.

Everything that indexes memory is checked here, on the host: XLA clips a bad index silently and
would read, or write, what is another sequence's. Knows no program and no pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from engine.kernels.lora import AdapterLists
from engine.model.context import StepInputs
from engine.model.place import FULL
from engine.step import IntArray, SequenceWork, StepBatch


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape: `rows` decode rows and `chunk` prefill tokens, with or without adapters.

    `has_hidden`: the final hidden states of the chunk are a result too.
    """

    rows: int
    chunk: int
    has_adapters: bool = False
    has_hidden: bool = False

    @property
    def tokens(self) -> int:
        """Tokens evaluated, padding included."""
        return self.rows + self.chunk

    @property
    def outputs(self) -> int:
        """Sequences: the decode rows, then the chunk."""
        return self.rows + (1 if self.chunk else 0)


@dataclass(frozen=True)
class StepLimits:
    """What indexes may name.

    `num_pages` are usable pages of the kv pool and, in models that have it, of the swa pool, empty
    in models without attention; `table_pages` is the width of a page table, `num_adapters` the
    places of the banks, `num_states` the usable states of recurrent layers.
    """

    vocab_size: int
    page_tokens: int
    num_pages: tuple[int, ...]
    table_pages: int
    num_adapters: int = 0
    num_states: int = 0


@dataclass(frozen=True)
class PackedStep:
    """How the parts of a step of one bucket lie in its array."""

    bucket: Bucket
    limits: StepLimits

    @property
    def length(self) -> int:
        """Integers in all."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Of tokens, positions, offsets, pages, tables, states, outputs, logits flag, adapters."""
        tokens, outputs = self.bucket.tokens, self.bucket.outputs
        kinds = len(self.limits.num_pages)
        tables = kinds * outputs * self.limits.table_pages
        adapters = outputs * self.limits.num_adapters if self.bucket.has_adapters else 0
        rows = (outputs, outputs, 1, adapters, adapters)
        return (tokens, tokens, tokens, kinds * tokens, tables, *rows)

    def pack(self, batch: StepBatch) -> IntArray:
        """Returns the array of a step, padding included; `unpack` is its inverse.

        Raises:
            ValueError: A token, a position, a page, a state or an adapter is out of range.
        """
        bucket, limits = self.bucket, self.limits
        tokens = np.zeros(bucket.tokens, np.int32)
        positions = np.full(bucket.tokens, -1, np.int32)
        offsets = np.zeros(bucket.tokens, np.int32)
        pages = np.zeros((len(limits.num_pages), bucket.tokens), np.int32)
        tables = np.zeros((len(limits.num_pages), bucket.outputs, limits.table_pages), np.int32)
        states = np.zeros(bucket.outputs, np.int32)
        outputs = np.arange(bucket.outputs, dtype=np.int32)
        if batch.chunk:
            outputs[-1] = bucket.rows + len(batch.chunk.tokens) - 1
        for first, work in self._placed(batch):
            _check_tokens(limits, work)
            # A decode row is one token: numbers are packed faster than arrays of one are made.
            span: int | slice = first
            at: int | IntArray = work.start
            ids: int | Sequence[int] = work.tokens[0]
            if len(work.tokens) > 1:
                span = slice(first, first + len(work.tokens))
                at = np.arange(work.start, work.start + len(work.tokens), dtype=np.int32)
                ids = work.tokens
            tokens[span] = ids
            positions[span] = at
            offsets[span] = at % limits.page_tokens
            states[first] = _checked_state(limits, work)
            for kind, table in enumerate(_checked_tables(limits, work)):
                tables[kind, first, : len(table)] = table
                pages[kind, span] = tables[kind, first, at // limits.page_tokens]
        wants = np.array([any(work.wants_logits for _, work in self._placed(batch))], np.int32)
        parts = [tokens, positions, offsets, pages.ravel(), tables.ravel(), states, outputs, wants]
        if bucket.has_adapters:
            parts += self._adapter_lists(batch)
        return np.concatenate(parts)

    def _placed(self, batch: StepBatch) -> Iterator[tuple[int, SequenceWork]]:
        """Every sequence with the place of its first token; that of its row is the same."""
        yield from enumerate(batch.decodes)
        if batch.chunk:
            yield self.bucket.rows, batch.chunk

    def _adapter_lists(self, batch: StepBatch) -> list[IntArray]:
        most = self.limits.num_adapters
        places = np.full((self.bucket.outputs, most), -1, np.int32)
        scales = np.zeros((self.bucket.outputs, most), np.float32)
        for row, work in self._placed(batch):
            if len(work.adapters) > most:
                raise ValueError(f"{len(work.adapters)} adapters of {most}")
            for index, (place, scale) in enumerate(work.adapters):
                if not 0 <= place < most:
                    raise ValueError(f"adapter place {place} of {most}")
                places[row, index], scales[row, index] = place, scale
        return [places.ravel(), scales.view(np.int32).ravel()]

    def unpack(self, packed: jax.Array) -> StepInputs:
        """Takes the array apart, inside a program."""
        parts = jax.numpy.split(packed, np.cumsum(self._sizes)[:-1])
        tokens, positions, offsets, pages, tables, states, outputs, wants, places, scales = parts
        bucket, kinds = self.bucket, len(self.limits.num_pages)
        adapters = None
        if bucket.has_adapters:
            shape = (bucket.outputs, self.limits.num_adapters)
            factors = jax.lax.bitcast_convert_type(scales, np.float32)
            adapters = AdapterLists(places.reshape(shape), factors.reshape(shape))
        return StepInputs(
            tokens=tokens,
            positions=positions,
            offsets=offsets,
            pages=pages.reshape(kinds, bucket.tokens),
            tables=tables.reshape(kinds, bucket.outputs, self.limits.table_pages),
            states=states,
            outputs=outputs,
            wants_logits=wants[0],
            adapters=adapters,
        )


def _check_tokens(limits: StepLimits, work: SequenceWork) -> None:
    """A bad token id would read weights that are not the embedding's."""
    least, most = min(work.tokens), max(work.tokens)
    if least < 0 or most >= limits.vocab_size:
        raise ValueError(f"token ids {least}..{most} of {limits.vocab_size} tokens")


def _checked_tables(limits: StepLimits, work: SequenceWork) -> list[Sequence[int]]:
    """A sequence's page ids by kind."""
    tables = [work.pages, work.window_pages][: len(limits.num_pages)]
    end = work.start + len(work.tokens)
    if work.start < 0:
        raise ValueError(f"a first position of {work.start}")
    for kind, (table, limit) in enumerate(zip(tables, limits.num_pages, strict=True)):
        if len(table) > limits.table_pages or len(table) * limits.page_tokens < end:
            raise ValueError(f"{len(table)} pages for positions up to {end}")
        least = 1 if kind == FULL else 0  # pages behind the window are gone
        if len(table) and (min(table) < least or max(table) > limit):
            raise ValueError(f"page ids {min(table)}..{max(table)} of {limit}")
    return tables


def _checked_state(limits: StepLimits, work: SequenceWork) -> int:
    """A sequence's state; in models without recurrent layers there is none."""
    if not limits.num_states:
        return 0
    if not 1 <= work.state_id <= limits.num_states:
        raise ValueError(f"state {work.state_id} of {limits.num_states}")
    return work.state_id

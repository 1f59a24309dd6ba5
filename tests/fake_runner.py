"""A device without a model, with page memory of its own.

`FakeRunner` writes tokens at the pages and positions that it is given and computes the next token
from what it then reads there, so a wrong page table, a page used by two sequences or a leak between
slots changes the output and fails the test that compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.adapters.content import AdapterContent
from engine.memory.expert_store import ExpertShape
from engine.step import (
    DeviceSizes,
    FloatArray,
    IntArray,
    PageContent,
    PageLayout,
    PoolLost,
    RowLogits,
    SequenceWork,
    StateContent,
    StateLayout,
    StepBatch,
)
from engine.types import (
    ExpertFigures,
    PoolInfo,
    PoolKind,
)
from tests.fake_logits import (
    HALF_BITS,
    LAYERS,
    MOVED,
    STATE_TOKENS,
    TOKEN_SHAPE,
    UNWRITTEN,
    FakeRow,
    hashed_logits,
    history_of,
    moved,
    pattern,
    set_number,
    tokens_of,
    under,
)
from tests.fake_text import FakeTokenizer

# The experts of a fake model that has some: what they say changes no token.
EXPERTS = ExpertShape(num_layers=3, num_experts=4, top_k=2, slot_bytes=1000)


@dataclass(frozen=True)
class FakeStep:
    """A step that is computed when its results are asked for."""

    results: Callable[[], list[RowLogits | None]]


class FakeRead:
    """Pages in flight: the host's arrays are zeros until `wait` copies them."""

    def __init__(self, gathered: IntArray, num_layers: int) -> None:
        self._gathered = gathered
        self._num_layers = num_layers
        shape = (num_layers, gathered.size, *TOKEN_SHAPE)
        self.host = PageContent(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def wait(self) -> PageContent:
        content = pattern(self._gathered, self._num_layers)
        np.copyto(self.host.keys, content.keys)
        np.copyto(self.host.values, content.values)
        return self.host


class FakeStateRead:
    """A state in flight: the host's array is zeros until `wait` copies it."""

    def __init__(self, conv: FloatArray) -> None:
        self._conv = conv
        self.host = StateContent(np.zeros_like(conv), None)

    def wait(self) -> StateContent:
        np.copyto(self.host.conv, self._conv)
        return self.host


@dataclass(frozen=True)
class FakePools:
    """What pools of these sizes would run on."""

    sizes: DeviceSizes


@dataclass
class FakeRunner:
    """Evaluates steps over its own page memory. Wrong work is an assertion, not a wrong answer.

    With a `window` a second memory, addressed by the window pages, holds the same tokens; of it only
    what the step's tokens see is read, and the answer depends on it too. `next_token` replaces the
    hash by a choice of one token. `on_run` is called when a step's results are asked for, while the
    device computes. `fail_with` makes the next step raise, then too unless `fails_at_start`; if that
    is a PoolLost, all memory is forgotten. `poison` returns NaN for sequences that begin with these
    tokens. With `max_texts` it is an encoder, whose steps have nothing but whole texts.
    """

    num_pages: int
    page_tokens: int
    vocab_size: int = FakeTokenizer().vocab_size
    max_decodes: int = 64
    max_chunk: int = 512
    max_texts: int = 0
    compiles: int = 0
    window: int | None = None
    num_window_pages: int = 0
    num_states: int = 0
    num_experts: int = 0
    next_token: Callable[[Sequence[int]], int] | None = None
    fail_with: Exception | None = None
    fails_at_start: bool = False
    poison: tuple[int, ...] | None = None
    on_run: Callable[[StepBatch], None] | None = None
    places: dict[int, bytes] = field(default_factory=dict[int, bytes])
    num_places: int = 0
    piece_bytes: int = 1
    batches: list[StepBatch] = field(default_factory=list[StepBatch])
    keep_batches: bool = False
    transfer_pages: int = 2
    fail_transfer_with: Exception | None = None
    can_move_tokens: bool = True
    fail_prepare_with: Exception | None = None
    fail_allocations_with: list[Exception] = field(default_factory=list[Exception])
    fail_warm_with: Exception | None = None

    _hidden: list[FloatArray] = field(default_factory=list[FloatArray], init=False)

    def __post_init__(self) -> None:
        self._sizes = DeviceSizes(
            self.num_pages, self.num_window_pages, self.num_states, self.num_experts
        )
        self._is_running = False
        self._forget()

    def expert_pool(self) -> tuple[PoolInfo, ExpertFigures]:
        """How the moe_cache pool stands: it is always full."""
        return EXPERTS.pool_info(self.num_experts, self.num_experts), ExpertFigures()

    @property
    def pools(self) -> FakePools:
        return FakePools(self._sizes)

    def prepare(self, sizes: DeviceSizes) -> FakePools:
        error, self.fail_prepare_with = self.fail_prepare_with, None
        if error is not None:
            raise error
        return FakePools(sizes)

    def free_pools(self, target: FakePools) -> None:
        """What is freed is gone: nothing of it may be read, whatever is allocated next."""
        now, then = self.pools.sizes, target.sizes
        if now.changes_pages(then):
            self._memory, self._window_memory = (np.empty((0, 0), np.int32) for _ in range(2))
        if now.changes_states(then):
            self._states = []
        self.num_experts = min(self.num_experts, then.moe_cache)

    def release_pools(self) -> None:
        self._memory, self._window_memory = (np.empty((0, 0), np.int32) for _ in range(2))
        self._states = []

    def allocate_pools(self, target: FakePools) -> None:
        if self.fail_allocations_with:
            raise self.fail_allocations_with.pop(0)
        sizes = target.sizes
        if not self._memory.size:
            shapes = ((sizes.kv + 1, self.page_tokens), (sizes.swa + 1, self.page_tokens))
            self._memory, self._window_memory = (
                np.full(shape, UNWRITTEN, dtype=np.int32) for shape in shapes
            )
        self._states = self._states or [None] * (sizes.mamba + 1)
        assert len(self._memory) == sizes.kv + 1
        assert len(self._window_memory) == sizes.swa + 1
        assert len(self._states) == sizes.mamba + 1
        self.num_pages, self.num_window_pages, self.num_states = sizes.kv, sizes.swa, sizes.mamba
        self.num_experts, self._sizes = sizes.moe_cache, sizes

    def warm(self) -> None:
        assert len(self._memory) == self.num_pages + 1
        error, self.fail_warm_with = self.fail_warm_with, None
        if error is not None:
            if isinstance(error, PoolLost):
                self._forget()
            raise error

    def give_back(self) -> None:
        """Nothing here is the process's memory."""

    @property
    def state_layout(self) -> StateLayout | None:
        return StateLayout(1, (2, STATE_TOKENS), None) if self.num_states else None

    def read_state(self, state_id: int) -> FakeStateRead:
        history = self._states[self._checked_state(state_id)]
        assert history is not None, "a state was read that was never written"
        self._fail_state(None)
        tokens = np.full(STATE_TOKENS, UNWRITTEN)
        tokens[: len(history)] = history
        # In two halves, because tokens under a set of adapters are larger than f32 can hold.
        halves = np.stack([tokens >> HALF_BITS, tokens & ((1 << HALF_BITS) - 1)])
        return FakeStateRead(halves[None].astype(np.float32))

    def write_state(self, state_id: int, content: StateContent) -> None:
        self._fail_state(self._checked_state(state_id))
        self._states[state_id] = tuple(history_of(content))

    def copy_state(self, source: int, target: int) -> None:
        assert self._states[self._checked_state(source)] is not None, "nothing is there to copy"
        self._fail_state(self._checked_state(target))
        self._states[target] = self._states[source]

    def _fail_state(self, changed: int | None) -> None:
        assert not self._is_running, "the device has a step"
        error, self.fail_transfer_with = self.fail_transfer_with, None
        if error is None:
            return
        if isinstance(error, PoolLost):
            self._forget()
        if changed is not None:
            self._states[changed] = None
        raise error

    def _checked_state(self, state_id: int) -> int:
        assert 1 <= state_id <= self.num_states, state_id
        return state_id

    def _carry_on(self, work: SequenceWork) -> None:
        """Before a step the state must be exactly that of the tokens before it."""
        held = self._states[self._checked_state(work.state_id)] if work.start else ()
        before = tuple(self._read(self._memory, work.pages, 0, work.start))
        assert held == before, "the state is another sequence's, or of another length"
        end = work.start + len(work.tokens)
        self._states[work.state_id] = tuple(self._read(self._memory, work.pages, 0, end))

    def page_layout(self, kind: PoolKind) -> PageLayout:
        num_layers = LAYERS[kind] if kind is PoolKind.KV or self.window is not None else 0
        dtype = np.dtype(np.float32)
        return PageLayout(num_layers, self.page_tokens, TOKEN_SHAPE, TOKEN_SHAPE, dtype)

    def read_pages(self, kind: PoolKind, page_ids: Sequence[int]) -> FakeRead:
        memory = self._pool(kind, page_ids)
        assert len(page_ids) <= self.transfer_pages
        self._fail_transfer(kind, ())
        return FakeRead(memory[list(page_ids)].reshape(-1), LAYERS[kind])

    def write_pages(self, kind: PoolKind, page_ids: Sequence[int], content: PageContent) -> None:
        memory = self._pool(kind, page_ids)
        assert len(page_ids) <= self.transfer_pages
        assert (len(page_ids) - 1) * self.page_tokens < content.num_tokens
        assert content.num_tokens <= len(page_ids) * self.page_tokens
        tokens = tokens_of(content)
        self._fail_transfer(kind, page_ids)
        whole = np.full(len(page_ids) * self.page_tokens, UNWRITTEN, np.int32)
        whole[: len(tokens)] = tokens
        memory[list(page_ids)] = whole.reshape(len(page_ids), -1)

    def copy_pages(self, kind: PoolKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        memory = self._pool(kind, [*sources, *targets])
        assert len(sources) == len(targets)
        assert not set(sources) & set(targets)
        self._fail_transfer(kind, targets)
        memory[list(targets)] = memory[list(sources)]

    def move_tokens(
        self,
        old_pages: Sequence[int],
        new_pages: Sequence[int],
        first: int,
        sources: Sequence[int],
    ) -> None:
        """Moved tokens are marked, as they keep what they saw: `moved` says how."""
        assert self.can_move_tokens
        assert self.window is None
        self._pool(PoolKind.KV, [*old_pages, *new_pages])
        assert list(sources) == sorted(set(sources))
        assert first <= min(sources, default=first)
        page = self.page_tokens
        changed = {new_pages[(first + i) // page] for i in range(len(sources))}
        self._fail_transfer(PoolKind.KV, sorted(changed))
        tokens = [int(self._memory[old_pages[at // page], at % page]) for at in sources]
        assert UNWRITTEN not in tokens, "a token was moved that was never written"
        for at, token in enumerate(tokens, first):
            self._memory[new_pages[at // page], at % page] = moved(token)

    def _pool(self, kind: PoolKind, page_ids: Sequence[int]) -> IntArray:
        size = self.num_pages if kind is PoolKind.KV else self.num_window_pages
        assert all(1 <= page_id <= size for page_id in page_ids), page_ids
        return self._memory if kind is PoolKind.KV else self._window_memory

    def _fail_transfer(self, kind: PoolKind, changed: Sequence[int]) -> None:
        assert not self._is_running, "the device has a step"
        error, self.fail_transfer_with = self.fail_transfer_with, None
        if error is None:
            return
        if isinstance(error, PoolLost):
            self._forget()
        self._pool(kind, changed)[list(changed)] = UNWRITTEN
        raise error

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Checks and evaluates a step."""
        return self.start(batch).results()

    def start(self, batch: StepBatch) -> FakeStep:
        """Checks a step; it touches no page before its results are asked for."""
        assert not self._is_running, "a step before the results of the last one"
        if self.keep_batches:
            self.batches.append(batch)
        assert self.num_experts == self._sizes.moe_cache, "experts of no size that was asked for"
        if self.max_texts:
            return self._running(batch, lambda: self._read_texts(batch))
        works = _whole_works(batch)
        self._check(batch, works)
        if self.fails_at_start:
            self._fail_if_due(works)
        return self._running(batch, lambda: self._evaluate(batch))

    def _running(self, batch: StepBatch, work: Callable[[], list[RowLogits | None]]) -> FakeStep:
        self._is_running = True

        def results() -> list[RowLogits | None]:
            assert self._is_running, "results are asked for once"
            if self.on_run is not None:
                self.on_run(batch)
            self._is_running = False
            return work()

        return FakeStep(results)

    def _evaluate(self, batch: StepBatch) -> list[RowLogits | None]:
        works = _whole_works(batch)
        self._fail_if_due(works)
        for work in works:
            self._write(self._memory, work.pages, work)
            if self.window is not None:
                self._write(self._window_memory, work.window_pages, work)
            if self.num_states:
                self._carry_on(work)
        chunk = batch.chunk if batch.wants_hidden else None
        self._hidden = [self._hidden_of(chunk)] if chunk else []
        results: list[RowLogits | None] = []
        for work in works:
            before = 0 if work is batch.chunk else len(work.tokens) - 1
            results += [*[None] * before, self._logits(work)]
        return results

    def _read_texts(self, batch: StepBatch) -> list[RowLogits | None]:
        assert not batch.decodes
        assert batch.chunk is None
        assert 1 <= len(batch.texts) <= self.max_texts
        assert batch.num_tokens <= self.max_chunk
        assert not any(text.start or text.wants_logits for text in batch.texts)
        assert all(text.wants_hidden for text in batch.texts)
        self._fail_if_due(batch.texts)
        self._hidden = [self._hidden_of(text) for text in batch.texts]
        return [None] * len(batch.texts)

    def hidden_states(self, text: int = 0) -> FloatArray:
        """Of each token: itself, its position, and one; what is in the pages decides the first."""
        assert self._hidden, "nothing asked for hidden states"
        return self._hidden[text]

    def _hidden_of(self, work: SequenceWork) -> FloatArray:
        at = np.arange(work.start, work.start + len(work.tokens))
        ones = np.ones(len(at))
        return np.stack([np.asarray(work.tokens), at, ones], axis=1).astype(np.float32)

    def write_adapter(self, place: int, content: AdapterContent) -> Iterator[int]:
        """Takes an adapter into a free place, in three pieces."""
        assert 0 <= place < self.num_places
        for _ in range(3):
            assert place not in self.places, "a place that is taken"
            yield self.piece_bytes
        self.places[place] = content.facts.digest

    def clear_adapter(self, place: int) -> None:
        """Frees a place."""
        del self.places[place]

    def _check(self, batch: StepBatch, works: Sequence[SequenceWork]) -> None:
        assert len(batch.decodes) <= self.max_decodes
        assert all(len(work.tokens) == 1 for work in batch.decodes)
        assert batch.chunk is None or 1 <= len(batch.chunk.tokens) <= self.max_chunk
        self._check_pages([(work.start, work.pages) for work in works], self.num_pages)
        held = [(work.start, work.window_pages) for work in works]
        self._check_pages(held, self.num_window_pages, least=0)
        for work in works:
            end = work.start + len(work.tokens)
            assert end <= len(work.pages) * self.page_tokens, "the pages do not cover the tokens"
            if self.window is not None:
                assert end <= len(work.window_pages) * self.page_tokens
                seen = work.window_pages[self._first_seen(work) // self.page_tokens :]
                assert 0 not in seen, "a page inside the window was given back"

    def _check_pages(
        self, tables: list[tuple[int, Sequence[int]]], size: int, least: int = 1
    ) -> None:
        """Sequences may share what they read; what one writes is in no other."""
        for index, (start, page_ids) in enumerate(tables):
            assert all(least <= page_id <= size for page_id in page_ids), page_ids
            held = [page_id for page_id in page_ids if page_id]
            assert len(set(held)) == len(held), "a page is in a sequence twice"
            written = {*page_ids[start // self.page_tokens :]} - {0}
            others = (page_id for _, ids in tables[:index] + tables[index + 1 :] for page_id in ids)
            assert not written.intersection(others), "a page is in two sequences"

    def _first_seen(self, work: SequenceWork) -> int:
        """The first position that the first token of the work sees in the window memory."""
        assert self.window is not None
        return max(0, work.start - self.window + 1)

    def _fail_if_due(self, works: Sequence[SequenceWork]) -> None:
        error, self.fail_with = self.fail_with, None
        if error is None:
            return
        if isinstance(error, PoolLost):
            self._forget()
        # A failed step may leave anything in the pages that it was to write into.
        for work in works:
            first = work.start // self.page_tokens
            self._memory[list(work.pages[first:])] = UNWRITTEN
            self._window_memory[list(work.window_pages[first:])] = UNWRITTEN
            if self.num_states:
                self._states[work.state_id] = None
        raise error

    def _forget(self) -> None:
        self._states: list[tuple[int, ...] | None] = [None] * (self.num_states + 1)
        sizes = (self.num_pages, self.num_window_pages)
        self._memory, self._window_memory = (
            np.full((size + 1, self.page_tokens), UNWRITTEN, dtype=np.int32) for size in sizes
        )

    def _write(self, memory: IntArray, pages: Sequence[int], work: SequenceWork) -> None:
        used = [place for place, _ in work.adapters]
        assert len(set(used)) == len(used), "a place is twice in a set"
        assert all(scale for _, scale in work.adapters), "an adapter that is off costs"
        number = set_number((self.places[place], scale) for place, scale in work.adapters)
        for position, token in enumerate(under(work.tokens, number), work.start):
            memory[pages[position // self.page_tokens], position % self.page_tokens] = token

    def _read(self, memory: IntArray, pages: Sequence[int], start: int, end: int) -> list[int]:
        """The tokens at positions start .. end - 1; no page before or after them is looked at."""
        first = start // self.page_tokens
        tokens = memory[list(pages[first : -(-end // self.page_tokens)])].reshape(-1)
        span = tokens[start - first * self.page_tokens : end - first * self.page_tokens].tolist()
        assert UNWRITTEN not in span, "a page was read that was never written"
        return span

    def _logits(self, work: SequenceWork) -> FakeRow | None:
        end = work.start + len(work.tokens)
        history = self._read(self._memory, work.pages, 0, end)
        recent: list[int] = []
        if self.window is not None:
            first = self._first_seen(work)
            seen = self._read(self._window_memory, work.window_pages, first, end)
            # Every token of a chunk sees its own window, though only the last one answers.
            assert seen == history[first:], "the window holds another sequence's tokens"
            recent = seen[-self.window :]
        if not work.wants_logits:
            return None
        tokens = [token % MOVED for token in history]
        if self.poison is not None and tuple(tokens[: len(self.poison)]) == self.poison:
            return FakeRow(np.full(self.vocab_size, np.nan, dtype=np.float32))
        logits = hashed_logits([*history, *recent], self.vocab_size)
        if self.next_token is not None:
            logits[self.next_token(tokens)] += np.float32(20)
        return FakeRow(logits)


def _whole_works(batch: StepBatch) -> list[SequenceWork]:
    """The step's works, with decodes that are consecutive tokens of one sequence as one work."""
    works: list[SequenceWork] = []
    for one in batch.decodes:
        last = works[-1] if works else None
        if last is None or not _follows(one, last):
            works.append(one)
            continue
        assert not one.state_id, "a state has no order within a step"
        assert not last.wants_logits, "logits before the last token"
        works[-1] = replace(one, tokens=(*last.tokens, *one.tokens), start=last.start)
    return [*works, *([batch.chunk] if batch.chunk else [])]


def _follows(one: SequenceWork, last: SequenceWork) -> bool:
    """Whether a work is the next of the same sequence, under the same adapters."""
    whole = replace(one, tokens=last.tokens, start=last.start, wants_logits=last.wants_logits)
    return whole == last and one.start == last.start + len(last.tokens)

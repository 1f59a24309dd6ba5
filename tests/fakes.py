"""A device, clock, tokenizer, chain and text stream without a model: the real engine runs on them.

`FakeRunner` keeps its own page memory. It writes tokens at the pages and positions that it is given
and computes the next token from what it then reads there, so a wrong page table, a page used by two
sequences or a leak between slots changes the output and fails the test that compares it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.content import AdapterContent
from engine.adapters.desk import NO_ADAPTERS, AdapterSetup
from engine.adapters.fit import TargetModel
from engine.engine import Engine
from engine.engine_parts import EngineParts
from engine.failpoints import Failpoints
from engine.memory.expert_store import ExpertShape
from engine.memory.planner import KvShape, MemoryPlan, plan_memory
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
    EngineConfig,
    EventSink,
    ExpertFigures,
    PoolInfo,
    PoolKind,
    Request,
)

_UNWRITTEN = -1
_STATE_TOKENS = 4096  # what a state can remember
_HALF_BITS = 16  # of a token, in each of two rows of a state
# Tokens are written with a number of the adapters that they were evaluated under.
_UNDER = 1 << 10
_MOVED = 128  # above every token of the alphabet


class FakeClock:
    """Time that moves only when a test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeTokenizer:
    """One token per byte of a small alphabet: 0 is BOS, 1 is EOS, then newline and ASCII.

    The last three tokens are the bytes of the euro sign, so text can end inside a character.
    """

    bos_token = 0
    eos_token = 1
    add_bos = True
    add_eos = False
    eog_tokens = frozenset({1})

    def __init__(self) -> None:
        text = [b"\n"] + [bytes([code]) for code in range(0x20, 0x7F)]
        self._pieces = [b"<s>", b"</s>", *text, b"\xe2", b"\x82", b"\xac"]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces)}

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Any character that is not in the alphabet becomes a question mark."""
        unknown = self._ids[b"?"]
        head = [self.bos_token] if add_special else []
        return head + [self._ids.get(bytes([code]), unknown) for code in text.encode()]

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        if token_id < 2 and not render_special:
            return b""
        return self._pieces[token_id]

    def decode(self, token_ids: Sequence[int], *, render_special: bool) -> bytes:
        return b"".join(self.piece(i, render_special=render_special) for i in token_ids)

    def prompt_text(self, token_ids: Sequence[int]) -> bytes:
        return self.decode(token_ids, render_special=True).removeprefix(b" ")


@dataclass(frozen=True)
class FakeRow:
    """Logits in an array."""

    logits: FloatArray

    @property
    def vocab_size(self) -> int:
        return len(self.logits)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.logits).all())

    @property
    def log_sum_exp(self) -> float:
        peak = float(self.logits.max())
        return peak + math.log(float(np.exp(self.logits.astype(np.float64) - peak).sum()))

    def top(self) -> tuple[IntArray, FloatArray]:
        order = np.argsort(-self.logits, kind="stable").astype(np.int32)
        return order, self.logits[order]

    def at(self, token_ids: IntArray) -> FloatArray:
        return self.logits[token_ids]

    def full(self) -> FloatArray:
        return self.logits


def hashed_logits(history: Sequence[int], vocab_size: int) -> FloatArray:
    """The fake model: logits in [0, 8) that depend on every token of the history, in order."""
    data = np.asarray(history, dtype=np.int32).tobytes()
    noise = np.frombuffer(hashlib.shake_128(data).digest(2 * vocab_size), dtype=np.uint16)
    return noise.astype(np.float32) / np.float32(8192)


def set_number(members: Iterable[tuple[bytes, float]]) -> int:
    """A number of a set of adapters, by content and scale; 0 for none."""
    named = sorted((digest, np.float32(scale).tobytes()) for digest, scale in members)
    if not named:
        return 0
    data = b"".join(digest + scale for digest, scale in named)
    return 1 + int.from_bytes(hashlib.sha256(data).digest()[:2], "little")


def under(tokens: Sequence[int], number: int, start: int = 0) -> list[int]:
    """Tokens as the fake model's history has them, from `start` on under a set of adapters."""
    return [token + _UNDER * (number if i >= start else 0) for i, token in enumerate(tokens)]


def model_logits(history: Sequence[int], vocab_size: int, window: int | None = None) -> FloatArray:
    """What `FakeRunner` answers to a sequence evaluated alone; with a window, it looks there too."""
    recent = () if window is None else history[-window:]
    return hashed_logits((*history, *recent), vocab_size)


def scripted(answer: Sequence[int], prompt_tokens: int) -> Callable[[Sequence[int]], int]:
    """A model that answers every prompt of this length with `answer`, then ends."""

    def next_token(history: Sequence[int]) -> int:
        done = len(history) - prompt_tokens
        return answer[done] if done < len(answer) else FakeTokenizer.eos_token

    return next_token


# The experts of a fake model that has some: what they say changes no token.
EXPERTS = ExpertShape(num_layers=3, num_experts=4, top_k=2, slot_bytes=1000)
# As `fake_shape` has them: layers by pool, and (heads, dim) of a token's keys and of its values.
_LAYERS = {PoolKind.KV: 2, PoolKind.SWA: 1}
_TOKEN_SHAPE = (2, 8)


def pattern(tokens: IntArray, num_layers: int) -> PageContent:
    """What the fake device holds for tokens: another number at every layer and head, exact in f32.

    So content of another layer, head, token or of the other array is never taken for the right one.
    Components take turns with the low byte of the token and with what is above it.
    """
    heads, dim = _TOKEN_SHAPE
    places = np.arange(num_layers * heads).reshape(num_layers, 1, heads, 1)
    parts = np.stack([tokens % 256, tokens // 256] * (dim // 2), axis=-1)
    keys = parts[None, :, None, :] * 16 + places * 4
    return PageContent(keys.astype(np.float32), (-4 - keys).astype(np.float32))


def tokens_of(content: PageContent) -> IntArray:
    """The tokens that a pattern stands for, which must be whole; zeros stand for none."""
    low, high = (content.keys[0, :, 0, :2] // 16).astype(np.int32).T
    tokens = high * 256 + low
    expected = pattern(tokens, content.keys.shape[0])
    is_empty = ~(content.keys.any((0, 2, 3)) | content.values.any((0, 2, 3)))
    is_key = (content.keys == expected.keys).all((0, 2, 3))
    assert (is_empty | is_key).all(), "keys of no token"
    is_value = (content.values == expected.values).all((0, 2, 3))
    assert (is_empty | is_value).all(), "values of no token"
    return np.where(is_empty, _UNWRITTEN, tokens)


def history_of(content: StateContent) -> list[int]:
    """The tokens that a state of the fake device has seen."""
    high, low = content.conv[0].astype(int)
    tokens: list[int] = ((high << _HALF_BITS) | low).tolist()
    return [token for token in tokens if token != _UNWRITTEN]


def letters_of(history: Sequence[int]) -> list[int]:
    """The tokens of a history, whatever adapters they were read under and wherever they stood."""
    return [token % _MOVED for token in history]


def moved(token: int) -> int:
    """What a token is on the fake device once it was moved: another one, as its past is another."""
    return token | _MOVED


class FakeRead:
    """Pages in flight: the host's arrays are zeros until `wait` copies them."""

    def __init__(self, gathered: IntArray, num_layers: int) -> None:
        self._gathered = gathered
        self._num_layers = num_layers
        shape = (num_layers, gathered.size, *_TOKEN_SHAPE)
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
    hash by a choice of one token. `fail_with` makes the next step raise; if that is a PoolLost, all
    memory is forgotten. `poison` returns NaN for sequences that begin with these tokens. With
    `max_texts` it is an encoder, whose steps have nothing but whole texts.
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
                np.full(shape, _UNWRITTEN, dtype=np.int32) for shape in shapes
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
        return StateLayout(1, (2, _STATE_TOKENS), None) if self.num_states else None

    def read_state(self, state_id: int) -> FakeStateRead:
        history = self._states[self._checked_state(state_id)]
        assert history is not None, "a state was read that was never written"
        self._fail_state(None)
        tokens = np.full(_STATE_TOKENS, _UNWRITTEN)
        tokens[: len(history)] = history
        # In two halves, because tokens under a set of adapters are larger than f32 can hold.
        halves = np.stack([tokens >> _HALF_BITS, tokens & ((1 << _HALF_BITS) - 1)])
        return FakeStateRead(halves[None].astype(np.float32))

    def write_state(self, state_id: int, content: StateContent) -> None:
        self._fail_state(self._checked_state(state_id))
        self._states[state_id] = tuple(history_of(content))

    def copy_state(self, source: int, target: int) -> None:
        assert self._states[self._checked_state(source)] is not None, "nothing is there to copy"
        self._fail_state(self._checked_state(target))
        self._states[target] = self._states[source]

    def _fail_state(self, changed: int | None) -> None:
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
        num_layers = _LAYERS[kind] if kind is PoolKind.KV or self.window is not None else 0
        dtype = np.dtype(np.float32)
        return PageLayout(num_layers, self.page_tokens, _TOKEN_SHAPE, _TOKEN_SHAPE, dtype)

    def read_pages(self, kind: PoolKind, page_ids: Sequence[int]) -> FakeRead:
        memory = self._pool(kind, page_ids)
        assert len(page_ids) <= self.transfer_pages
        self._fail_transfer(kind, ())
        return FakeRead(memory[list(page_ids)].reshape(-1), _LAYERS[kind])

    def write_pages(self, kind: PoolKind, page_ids: Sequence[int], content: PageContent) -> None:
        memory = self._pool(kind, page_ids)
        assert len(page_ids) <= self.transfer_pages
        assert (len(page_ids) - 1) * self.page_tokens < content.num_tokens
        assert content.num_tokens <= len(page_ids) * self.page_tokens
        tokens = tokens_of(content)
        self._fail_transfer(kind, page_ids)
        whole = np.full(len(page_ids) * self.page_tokens, _UNWRITTEN, np.int32)
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
        assert _UNWRITTEN not in tokens, "a token was moved that was never written"
        for at, token in enumerate(tokens, first):
            self._memory[new_pages[at // page], at % page] = moved(token)

    def _pool(self, kind: PoolKind, page_ids: Sequence[int]) -> IntArray:
        size = self.num_pages if kind is PoolKind.KV else self.num_window_pages
        assert all(1 <= page_id <= size for page_id in page_ids), page_ids
        return self._memory if kind is PoolKind.KV else self._window_memory

    def _fail_transfer(self, kind: PoolKind, changed: Sequence[int]) -> None:
        error, self.fail_transfer_with = self.fail_transfer_with, None
        if error is None:
            return
        if isinstance(error, PoolLost):
            self._forget()
        self._pool(kind, changed)[list(changed)] = _UNWRITTEN
        raise error

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Checks and evaluates a step."""
        if self.on_run is not None:
            self.on_run(batch)
        if self.keep_batches:
            self.batches.append(batch)
        assert self.num_experts == self._sizes.moe_cache, "experts of no size that was asked for"
        if self.max_texts:
            return self._read_texts(batch)
        works = batch.works
        self._check(batch, works)
        if self.fail_with is not None:
            self._fail(self.fail_with, works)
        for work in works:
            self._write(self._memory, work.pages, work)
            if self.window is not None:
                self._write(self._window_memory, work.window_pages, work)
            if self.num_states:
                self._carry_on(work)
        chunk = batch.chunk if batch.wants_hidden else None
        self._hidden = [self._hidden_of(chunk)] if chunk else []
        return [self._logits(work) for work in works]

    def _read_texts(self, batch: StepBatch) -> list[RowLogits | None]:
        assert not batch.decodes
        assert batch.chunk is None
        assert 1 <= len(batch.texts) <= self.max_texts
        assert batch.num_tokens <= self.max_chunk
        assert not any(text.start or text.wants_logits for text in batch.texts)
        assert all(text.wants_hidden for text in batch.texts)
        if self.fail_with is not None:
            self._fail(self.fail_with, batch.texts)
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

    def _fail(self, error: Exception, works: Sequence[SequenceWork]) -> None:
        self.fail_with = None
        if isinstance(error, PoolLost):
            self._forget()
        # A failed step may leave anything in the pages that it was to write into.
        for work in works:
            first = work.start // self.page_tokens
            self._memory[list(work.pages[first:])] = _UNWRITTEN
            self._window_memory[list(work.window_pages[first:])] = _UNWRITTEN
            if self.num_states:
                self._states[work.state_id] = None
        raise error

    def _forget(self) -> None:
        self._states: list[tuple[int, ...] | None] = [None] * (self.num_states + 1)
        sizes = (self.num_pages, self.num_window_pages)
        self._memory, self._window_memory = (
            np.full((size + 1, self.page_tokens), _UNWRITTEN, dtype=np.int32) for size in sizes
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
        assert _UNWRITTEN not in span, "a page was read that was never written"
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
        tokens = [token % _MOVED for token in history]
        if self.poison is not None and tuple(tokens[: len(self.poison)]) == self.poison:
            return FakeRow(np.full(self.vocab_size, np.nan, dtype=np.float32))
        logits = hashed_logits([*history, *recent], self.vocab_size)
        if self.next_token is not None:
            logits[self.next_token(tokens)] += np.float32(20)
        return FakeRow(logits)


@dataclass
class GreedyChain:
    """Takes the best token; knows biases and nothing else of sampling."""

    bias: dict[int, float]
    row: RowLogits | None = None
    token: int = -1

    def sample(self, row: RowLogits) -> int:
        logits = row.full().copy()
        for token_id, bias in self.bias.items():
            logits[token_id] += np.float32(bias)
        self.row = row
        self.token = int(np.argmax(logits))
        return self.token

    def probabilities(
        self, n: int, *, post_chain: bool
    ) -> tuple[float, Sequence[tuple[int, float]]]:
        """Of the raw logits; after a greedy choice all the probability is the chosen token's."""
        if post_chain:
            return 0.0, [(self.token, 0.0)][:n]
        assert self.row is not None
        ids, logits = self.row.top()
        total = self.row.log_sum_exp
        sampled = float(self.row.full()[self.token]) - total
        return sampled, [
            (int(i), float(x) - total) for i, x in zip(ids[:n], logits[:n], strict=True)
        ]


def begin_greedy(request: Request, seed: int) -> GreedyChain:
    bias = dict(request.sampling.logit_bias)
    if request.ignore_eos:
        bias |= dict.fromkeys(FakeTokenizer.eog_tokens, -math.inf)
    return GreedyChain(bias)


@dataclass(frozen=True)
class PlainRelease:
    text: str
    mid_character: bool = False
    stop_string: str | None = None


class PlainText:
    """Text as it comes: withholds only what is inside a character or may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = b""

    def push(self, piece: bytes, *, is_eog: bool = False) -> PlainRelease:
        self._held += piece
        try:
            text = self._held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return PlainRelease("", mid_character=True)
            text = self._held.decode(errors="replace")
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, stop = min(found)
            self._held = b""
            return PlainRelease(text[:at], stop_string=stop)
        ends = (text.endswith(stop[:n]) for stop in self._stops for n in range(1, len(stop)))
        if not is_eog and any(ends):
            return PlainRelease("")
        self._held = b""
        return PlainRelease(text)

    def unsent(self) -> str:
        return self._held.decode(errors="replace")


def fake_engine(
    sink: EventSink,
    *,
    config: EngineConfig | None = None,
    runner: FakeRunner | None = None,
    clock: Callable[[], float] | None = None,
    failpoints: Failpoints | None = None,
    training_tokens: int = 1 << 20,
    window: int | None = None,
    num_adapters: int = 0,
    is_recurrent: bool = False,
    **changes: Any,
) -> Engine:
    """The real engine over the fakes, not started. The default has 4 slots of 256 tokens.

    With a `window` the model has a layer of it, if `is_recurrent` one with a state; a given runner
    then needs the same.
    """
    config = config or EngineConfig(context_tokens=256, num_slots=4, page_tokens=16)
    plan = plan_memory(config, fake_shape(window, is_recurrent), training_tokens)
    error_ids = iter(range(1 << 62))
    runner = runner or fitting_runner(plan)
    if runner.num_experts:
        changes["experts"] = runner.expert_pool
    parts = EngineParts(
        runner=runner,
        adapters=_adapter_setup(runner, num_adapters),
        tokenizer=FakeTokenizer(),
        begin_chain=begin_greedy,
        begin_text=PlainText,
        clock=clock or FakeClock(),
        draw_seed=lambda: 42,
        new_error_id=lambda: f"error-{next(error_ids)}",
        failpoints=failpoints or Failpoints(),
        **changes,
    )
    return Engine(config, plan, parts, sink=sink)


def _adapter_setup(runner: FakeRunner, count: int) -> AdapterSetup:
    if not count:
        return NO_ADAPTERS
    runner.num_places = count
    model = TargetModel("fake", runner.vocab_size, {"blk.0.attn_q.weight": (4, 4)})
    return AdapterSetup(runner, AdapterCapacity(count=count, rank=4), model)


def fitting_runner(plan: MemoryPlan, num_experts: int = 0) -> FakeRunner:
    """A runner with the pools of a plan, and experts in memory."""
    return FakeRunner(
        plan.kv_pages,
        plan.page_tokens,
        window=plan.window.window if plan.window else None,
        num_window_pages=plan.window.pages if plan.window else 0,
        num_states=plan.states.states if plan.states else 0,
        num_experts=num_experts,
    )


def fake_shape(window: int | None = None, is_recurrent: bool = False) -> KvShape:
    """Two layers that see everything, one that sees only a `window`, and one with a state."""
    return KvShape(
        num_layers=2,
        num_kv_heads=2,
        key_dim=8,
        value_dim=8,
        num_window_layers=0 if window is None else 1,
        window=window or 0,
        state_bytes=100 if is_recurrent else 0,
    )

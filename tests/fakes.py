"""A device, clock, tokenizer, chain and text stream without a model: the real engine runs on them.

`FakeRunner` keeps its own page memory. It writes tokens at the pages and positions that it is given
and computes the next token from what it then reads there, so a wrong page table, a page used by two
sequences or a leak between slots changes the output and fails the test that compares it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.engine import Engine, EngineParts
from engine.failpoints import Failpoints
from engine.memory.planner import KvShape, plan_memory
from engine.step import FloatArray, IntArray, RowLogits, SequenceWork, StepBatch
from engine.types import EngineConfig, EventSink, Request

_UNWRITTEN = -1


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


def scripted(answer: Sequence[int], prompt_tokens: int) -> Callable[[Sequence[int]], int]:
    """A model that answers every prompt of this length with `answer`, then ends."""

    def next_token(history: Sequence[int]) -> int:
        done = len(history) - prompt_tokens
        return answer[done] if done < len(answer) else FakeTokenizer.eos_token

    return next_token


@dataclass
class FakeRunner:
    """Evaluates steps over its own page memory. Wrong work is an assertion, not a wrong answer.

    `next_token` replaces the hash by a choice of one token. `fail_with` makes the next step raise.
    `poison` returns NaN for sequences that begin with these tokens.
    """

    num_pages: int
    page_tokens: int
    vocab_size: int = FakeTokenizer().vocab_size
    max_decodes: int = 64
    max_chunk: int = 512
    compiles: int = 0
    next_token: Callable[[Sequence[int]], int] | None = None
    fail_with: Exception | None = None
    poison: tuple[int, ...] | None = None
    on_run: Callable[[StepBatch], None] | None = None
    batches: list[StepBatch] = field(default_factory=list[StepBatch])
    keep_batches: bool = False

    def __post_init__(self) -> None:
        self._memory = np.full((self.num_pages + 1, self.page_tokens), _UNWRITTEN, dtype=np.int32)

    def run(self, batch: StepBatch) -> list[RowLogits | None]:
        """Checks and evaluates a step."""
        if self.on_run is not None:
            self.on_run(batch)
        if self.keep_batches:
            self.batches.append(batch)
        works = batch.decodes if batch.chunk is None else (*batch.decodes, batch.chunk)
        self._check(batch, works)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            self._scribble(works)
            raise error
        for work in works:
            self._write(work)
        return [self._logits(work) if work.wants_logits else None for work in works]

    def _check(self, batch: StepBatch, works: Sequence[SequenceWork]) -> None:
        assert len(batch.decodes) <= self.max_decodes
        assert all(len(work.tokens) == 1 for work in batch.decodes)
        assert batch.chunk is None or 1 <= len(batch.chunk.tokens) <= self.max_chunk
        pages = [page_id for work in works for page_id in work.pages]
        assert all(1 <= page_id <= self.num_pages for page_id in pages), pages
        assert len(set(pages)) == len(pages), "a page is in two sequences"
        for work in works:
            end = work.start + len(work.tokens)
            assert end <= len(work.pages) * self.page_tokens, "the pages do not cover the tokens"

    def _scribble(self, works: Sequence[SequenceWork]) -> None:
        """A failed step may leave anything in the pages that it was given."""
        for work in works:
            self._memory[list(work.pages)] = _UNWRITTEN

    def _write(self, work: SequenceWork) -> None:
        for position, token in enumerate(work.tokens, work.start):
            page, offset = self._place(work, position)
            self._memory[page, offset] = token

    def _place(self, work: SequenceWork, position: int) -> tuple[int, int]:
        return work.pages[position // self.page_tokens], position % self.page_tokens

    def _logits(self, work: SequenceWork) -> FakeRow:
        end = work.start + len(work.tokens)
        history = self._memory[list(work.pages)].reshape(-1)[:end].tolist()
        assert _UNWRITTEN not in history, "a page was read that was never written"
        if self.poison is not None and tuple(history[: len(self.poison)]) == self.poison:
            return FakeRow(np.full(self.vocab_size, np.nan, dtype=np.float32))
        logits = hashed_logits(history, self.vocab_size)
        if self.next_token is not None:
            logits[self.next_token(history)] += np.float32(20)
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
) -> Engine:
    """The real engine over the fakes, not started. The default has 4 slots of 256 tokens."""
    config = config or EngineConfig(context_tokens=256, num_slots=4, page_tokens=16)
    shape = KvShape(num_layers=2, num_kv_heads=2, key_dim=8, value_dim=8)
    plan = plan_memory(config, shape, training_tokens)
    error_ids = iter(range(1 << 62))
    parts = EngineParts(
        runner=runner or FakeRunner(plan.kv_pages, plan.page_tokens),
        tokenizer=FakeTokenizer(),
        begin_chain=begin_greedy,
        begin_text=PlainText,
        clock=clock or FakeClock(),
        draw_seed=lambda: 42,
        new_error_id=lambda: f"error-{next(error_ids)}",
        failpoints=failpoints or Failpoints(),
    )
    return Engine(config, plan, parts, sink=sink)

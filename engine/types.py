"""What comes out of the engine: events, snapshots; and how it is made. Frozen, no behaviour.

Nothing here knows a transport, an array or a model. Token ids are plain ints, durations are
seconds on the engine's clock, counts are tokens unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.requests import AdapterScale, Request


class FinishReason(Enum):
    """Why a generation ended (cancel and faults are errors, not reasons)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TIME = "time"
    INDENT = "indent"
    EMPTY_PROMPT = "empty_prompt"


class CacheSource(Enum):
    """Where reused prompt tokens came from."""

    NONE = "none"
    SLOT = "slot"
    INDEX = "index"
    HOST = "host"


class CancelCause(Enum):
    """Who ended a request early."""

    CLIENT = "client"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class Started:
    """Sent once, at admission to a slot. `no_reuse` says why nothing was reused ("" if it was)."""

    slot_id: int
    prompt_tokens: int
    cached_tokens: int
    cache_source: CacheSource
    no_reuse: str
    adapters: tuple[AdapterScale, ...]
    seed: int


@dataclass(frozen=True)
class Progress:
    """How much of the prompt is in the pool; `processed` includes the cached part."""

    total: int
    cached: int
    processed: int
    elapsed_s: float


@dataclass(frozen=True)
class TokenProb:
    """A token with its natural-log probability and its raw bytes (a piece may not be UTF-8)."""

    token_id: int
    piece: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one step: of the raw logits, or of the chain's result when asked for.

    `top` is sorted by falling probability; with post-chain probabilities zero entries are absent.
    """

    sampled: TokenProb
    top: tuple[TokenProb, ...]


@dataclass(frozen=True)
class Chunk:
    """One sampled token and the text that it released.

    `text` may be empty (withheld for a stop string, or inside a character); `mid_character` says
    that the text so far ends inside a UTF-8 sequence. `completes_stop`: this token completed a
    stop string. `logprobs` is None when not asked for.
    """

    text: str
    token_id: int
    completion_tokens: int
    mid_character: bool = False
    completes_stop: bool = False
    logprobs: TokenLogprobs | None = None
    decode_s: float = 0.0


@dataclass(frozen=True)
class Finished:
    """The last event of a request that was served.

    `held_tokens` is what the slot now holds (prompt + generated - 1). `unsent_text` was withheld
    when the budget ended. `stop_string` and `stop_token_id` say what matched. `truncated`: the
    context filled or was shifted. `evaluated + cached = prompt` always holds. `indent_cut_chars`
    is how many characters at the end of all text (sent, then unsent) an INDENT ending takes back:
    streams have shown them already, a collected answer drops them.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    held_tokens: int
    unsent_text: str
    has_new_line: bool
    truncated: bool
    queue_s: float
    prefill_s: float
    decode_s: float
    stop_string: str | None = None
    stop_token_id: int | None = None
    indent_cut_chars: int = 0


@dataclass(frozen=True)
class Embedded:
    """The last event of a request for a vector: `values` are rows of f32, little-endian."""

    values: bytes
    num_rows: int
    dimension: int
    prompt_tokens: int


@dataclass(frozen=True)
class Failed:
    """The last event of a request that was not served. `error` is from `engine.errors`."""

    error: Exception


@dataclass(frozen=True)
class Cancelled:
    """The last event of a request that its caller (or the server's end) cancelled."""

    cause: CancelCause


Event = Started | Progress | Chunk | Finished | Embedded | Failed | Cancelled

# Called once per step, on the engine thread, with (request id, event) in order of occurrence.
EventSink = Callable[[Sequence[tuple[str, Event]]], None]


class SlotState(Enum):
    """What a slot does now."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"


@dataclass(frozen=True)
class SlotInfo:
    """A slot as lists show it. `request` is the one it serves or served last (None: never used).

    `held_tokens` are in its pages now; `evaluated_tokens`, `cached_tokens` and `decoded_tokens`
    count for the running request and are 0 when idle. `remaining_tokens` -1 is unlimited or idle.
    `task_id` counts requests admitted by this engine, from 0.
    """

    slot_id: int
    state: SlotState
    context_tokens: int
    held_tokens: int
    pages: int
    evaluated_tokens: int
    cached_tokens: int
    decoded_tokens: int
    remaining_tokens: int
    has_new_line: bool
    task_id: int
    request: Request | None


class PoolKind(Enum):
    """The four pools of the design."""

    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"
    MOE_CACHE = "moe_cache"


@dataclass(frozen=True)
class PoolInfo:
    """One pool in usable units (the sink is extra). `free + cached + pinned = size` when idle.

    `used` counts units that a running request holds; `pinned` units that idle slots hold;
    `cached` those only the prefix index holds. `unit_tokens` is 0 where a unit is no run of tokens.
    """

    kind: PoolKind
    size: int
    free: int
    used: int
    pinned: int
    cached: int
    floor: int
    ceiling: int
    unit_bytes: int
    unit_tokens: int


@dataclass(frozen=True)
class ExpertFigures:
    """What a cache of experts did since the start; all 0 where every expert is resident.

    `lookups` counts experts that layers of steps needed, `hits` those that were in memory, `loads`
    those that a step waited for, `loads_ahead` those read for a later layer. `stall_s` is the time
    that steps waited. `overlaps`: long prompts read the next layer ahead.
    """

    lookups: int = 0
    hits: int = 0
    loads: int = 0
    loads_ahead: int = 0
    stall_s: float = 0.0
    overlaps: bool = False


@dataclass(frozen=True)
class Counters:
    """Totals since the start. Every metric and every usage figure comes from these."""

    requests_started: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    requests_refused: int = 0
    prompt_tokens_evaluated: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    busy_slot_steps: int = 0
    preemptions: int = 0
    evicted_slots: int = 0
    max_held_tokens: int = 0
    compiles: int = 0


# Upper bounds of the classes in which step durations are counted, in seconds.
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class StepTimes:
    """How long the steps took that ran the model.

    `counts[i]` of them took at most `STEP_BOUNDS_S[i]` and more than the bound before; the last
    count is of those above every bound.
    """

    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_S) + 1)
    total_s: float = 0.0


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter as lists show it. `scale` is its float32 in the server's set.

    `alpha` None: the file has none. `targets` are the full names of the weights that it changes,
    `active_requests` how many requests that have begun run under a set with it, `digest` its
    SHA-256. `is_leaving`: it is unloaded once those have ended, and in no new set.
    """

    adapter_id: int
    name: str
    path: str
    rank: int
    alpha: float | None
    scale: float
    size_bytes: int
    active_requests: int
    task_name: str
    prompt_prefix: str
    invocation_tokens: tuple[int, ...]
    targets: tuple[str, ...]
    digest: bytes
    is_leaving: bool = False


@dataclass(frozen=True)
class Snapshot:
    """What lists and metrics read; published whole after each step, never changed.

    `host_cache_bytes` are those of prefixes that lost their place on the device, books included.
    """

    slots: tuple[SlotInfo, ...]
    pools: tuple[PoolInfo, ...]
    running: int
    queued: int
    queue_limit: int
    counters: Counters
    step_times: StepTimes = field(default_factory=StepTimes)
    adapters: tuple[AdapterInfo, ...] = ()
    experts: ExpertFigures | None = None
    host_cache_bytes: int = 0
    is_asleep: bool = False


@dataclass(frozen=True)
class StartAdapter:
    """An adapter to load at start, and its scale in the server's set."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class EngineConfig:
    """How the engine is laid out. The service's flag table is the only thing that fills it.

    `context_tokens` is the context of all slots together unless `unified`, when each slot may use
    all of it, but none more than `slot_tokens` (0: no such limit); `page_tokens` is not a flag (tests use 16 and 64). `chunk_tokens` bounds the prompt
    tokens of one step. `kv_dtype` is "f16" or "f32". `slot_similarity` is the least share of a
    prompt that a slot must hold to be chosen for it (0 turns that off). Sliding-window layers give
    pages behind the window back every `swa_evict_interval` decode steps; `swa_pages` None is the
    floor. Prompts of models with recurrent layers get a snapshot of their state every
    `snapshot_interval` tokens; `mamba_slots` None is room for a few. `host_cache_bytes` bounds the
    host memory for prefixes that lost their place on the device (None: unlimited, 0: off).
    `context_shift`: a full context loses tokens in its middle and the request goes on, instead of
    ending. Of a model with experts `moe_cache_slots` are in memory (None: all), and with
    `prefill_overlap` prompts read the next layer's ahead. `memory_budget` are the bytes that the
    engine may take in all: experts come first after `kv_reserve_tokens` of pages, which no rebuild
    goes below either, and pages take the rest. `device` is "cpu", "gpu",
    "metal", or "auto": a GPU if there is one. `kernels` is "native", "xla", or "auto": native where
    it was built and the device is a CPU. `adapters` are loaded at start, in this order;
    `max_adapters` None is as many as those, `max_adapter_rank` None the greatest of theirs. With
    `adapts_experts` there is room for adapters of experts even if none of those is one.
    After `sleep_idle_s` without anything to do the pools are freed until there is (None: never).
    `compile_cache` and `identity_cache` are folders for compiled programs and for hashes of
    weights; None keeps none.
    """

    context_tokens: int
    num_slots: int = 4
    unified: bool = True
    slot_tokens: int = 0
    page_tokens: int = 32
    chunk_tokens: int = 512
    kv_dtype: str = "f16"
    kv_pages: int | None = None
    swa_pages: int | None = None
    swa_evict_interval: int = 128
    mamba_slots: int | None = None
    snapshot_interval: int = 1024
    slot_similarity: float = 0.1
    host_cache_bytes: int | None = 0
    moe_cache_slots: int | None = None
    prefill_overlap: bool = True
    memory_budget: int | None = None
    kv_reserve_tokens: int | None = None
    context_shift: bool = False
    queue_requests: int = 256
    queue_bytes: int = 64 << 20
    threads: int | None = None
    device: str = "auto"
    kernels: str = "auto"
    compile_cache: str | None = None
    identity_cache: str | None = None
    adapters: tuple[StartAdapter, ...] = ()
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    adapts_experts: bool = False
    embeds: bool = False
    sleep_idle_s: float | None = None

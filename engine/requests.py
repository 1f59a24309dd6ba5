"""What is asked of the engine: a prompt, and how its answer is made. Frozen, no behaviour.

Token ids are plain ints, times are seconds on the engine's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.constraint import Constraint


class Sampler(Enum):
    """The samplers of the chain, in llama.cpp's names."""

    PENALTIES = "penalties"
    DRY = "dry"
    TOP_N_SIGMA = "top_n_sigma"
    TOP_K = "top_k"
    TYPICAL_P = "typ_p"
    TOP_P = "top_p"
    MIN_P = "min_p"
    XTC = "xtc"
    TEMPERATURE = "temperature"
    INFILL = "infill"
    ADAPTIVE_P = "adaptive_p"


class Mirostat(Enum):
    """Mirostat replaces the whole chain, penalties included."""

    OFF = 0
    V1 = 1
    V2 = 2


DEFAULT_SAMPLERS = (
    Sampler.PENALTIES,
    Sampler.DRY,
    Sampler.TOP_N_SIGMA,
    Sampler.TOP_K,
    Sampler.TYPICAL_P,
    Sampler.TOP_P,
    Sampler.MIN_P,
    Sampler.XTC,
    Sampler.TEMPERATURE,
)


@dataclass(frozen=True)
class SamplingParams:
    """How logits become a token. Defaults and meanings are llama.cpp's (contract 2.2 and 5.6).

    `seed` None draws a fresh seed. `logit_bias` holds (token id, bias) pairs, -inf forbids.
    `min_keep` is the least number of candidates that truncation samplers leave.
    """

    seed: int | None = None
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: Mirostat = Mirostat.OFF
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[Sampler, ...] = DEFAULT_SAMPLERS


class Pooling(Enum):
    """How the final states of a text's tokens become its vector, or with RANK its scores."""

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


@dataclass(frozen=True)
class AdapterScale:
    """The user's weight of one adapter; adapters that a set does not name are 0."""

    adapter_id: int
    scale: float


@dataclass(frozen=True)
class ReasoningBudget:
    """How long a model may think, in tokens of its vocabulary.

    `tokens` is the limit of each reasoning, 0 or more. `start` opens it, any of `ends` closes it.
    Once the limit is reached `forced` follows, token by token; its tail is one of `ends`.
    `opening` is the end of the prompt, from what may open reasoning on. `holds_constraint`: within
    reasoning the request's constraint neither holds nor moves on.
    """

    tokens: int
    start: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    forced: tuple[int, ...]
    opening: tuple[int, ...] = ()
    holds_constraint: bool = False


@dataclass(frozen=True)
class Request:
    """One generation, already tokenised.

    `max_tokens` None is unlimited; 0 still samples one token, as the peer does. `deadline_s` is
    a time on the engine's clock. `slot_id` None lets the engine choose. `top_logprobs` None
    turns log-probabilities off; n asks for the sampled token's and the n best.
    `preserved_tokens` are special tokens whose text is shown. `adapters` None means the server's
    set; an empty tuple means all off. `tenant` salts every prefix key. `n_indent` ends when a
    later line is indented less (0: off); `time_limit_s` ends at a newline after that long.
    `annotation` is the caller's own note, shown in slot lists and never read. Requests of one
    `group` (several samples or prompts of one call) count once in the queue; "" is no group.
    `constraint` is what the output is restricted to, already compiled. `reasoning` limits how long
    the model thinks; None does not look at it.
    `is_warming`: the prompt is computed and nothing is sampled. `pooling` asks for the prompt's
    vector instead of a generation; nothing is reused then, and nothing is kept.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    slot_id: int | None = None
    cache_prompt: bool = True
    n_keep: int = 0
    n_discard: int = 0
    n_cache_reuse: int = 0
    n_indent: int = 0
    time_limit_s: float | None = None
    top_logprobs: int | None = None
    post_sampling_probs: bool = False
    preserved_tokens: frozenset[int] = frozenset()
    render_special: bool = False
    adapters: tuple[AdapterScale, ...] | None = None
    progress: bool = False
    deadline_s: float | None = None
    tenant: str = ""
    annotation: str = ""
    group: str = ""
    constraint: Constraint | None = None
    reasoning: ReasoningBudget | None = None
    is_warming: bool = False
    pooling: Pooling | None = None

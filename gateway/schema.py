"""The fields of a completion body: names, aliases, kinds and defaults, in one table.

`read_params` turns a parsed body and the server's defaults into `CompletionParams`. Texts that
need the tokenizer (a bias by text, preserved tokens) stay texts here; `request` resolves them. This
module knows no route and no message of the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from gateway.errors import FieldError
from gateway.fields import (
    INT64_MAX,
    Adapters,
    Bias,
    Breakers,
    Flag,
    Float32,
    Integer,
    Kind,
    LenientText,
    LenientTexts,
    Refusal,
    Stops,
    Text,
    Texts,
    Trigger,
    Triggers,
    Unsigned32,
)
from gateway.samplers import SamplerNames

RANDOM_SEED = 2**32 - 1
REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")

BiasEntry = tuple[int | str, float]


@dataclass(frozen=True)
class CompletionParams:
    """One request as the peer would run it; the names are those of the body.

    `n_predict` -1 is the server's limit, which `server_n_predict` holds (-1: none).
    `is_eos_banned` is apart from `ignore_eos` because a request's `logit_bias` wipes the ban that
    the server's own `--ignore-eos` made, while the flag still shows.
    """

    verbose: bool = False
    timings_per_token: bool = False
    stream: bool = False
    include_usage: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    sse_ping_interval: int = 30
    n_predict: int = -1
    server_n_predict: int = -1
    n_indent: int = 0
    n_keep: int = 0
    n_discard: int = 0
    n_cmpl: int = 1
    n_cache_reuse: int = 0
    t_max_predict_ms: int = -1
    response_fields: tuple[str, ...] = ()
    top_k: int = 40
    top_p: float = 0.949999988079071
    min_p: float = 0.05000000074505806
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.10000000149011612
    typical_p: float = 1.0
    temperature: float = 0.800000011920929
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.10000000149011612
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.8999999761581421
    seed: int = RANDOM_SEED
    n_probs: int = 0
    min_keep: int = 0
    backend_sampling: bool = False
    post_sampling_probs: bool = False
    lora: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    json_schema: Any = None
    grammar_lazy: bool = False
    grammar_triggers: tuple[Trigger, ...] = ()
    reasoning_format: str = "deepseek"
    generation_prompt: str = ""
    parse_tool_calls: bool = False
    echo: bool = False
    preserved_texts: tuple[str, ...] = ()
    reasoning_control: bool = False
    reasoning_budget_tokens: int = -1
    reasoning_start: str = ""
    reasoning_ends: tuple[str, ...] = ()
    reasoning_message: str | None = None
    logit_bias: tuple[BiasEntry, ...] = ()
    ignore_eos: bool = False
    is_eos_banned: bool = False
    stop: tuple[str, ...] = ()
    samplers: tuple[str, ...] = (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )
    chat_format: str = "Content-only"

    @property
    def token_limit(self) -> int | None:
        """Most tokens to sample; None is unlimited."""
        limit = self.n_predict if self.n_predict >= 0 else self.server_n_predict
        return limit if limit >= 0 else None

    @property
    def is_reasoning_in_content(self) -> bool:
        """Whether a stream leaves reasoning in the content, as deepseek-legacy does."""
        return self.stream and self.reasoning_format == "deepseek-legacy"


@dataclass(frozen=True)
class Field:
    """One parameter: where it is kept, its kind, and the names it answers to.

    The first name that holds a value wins; no names means that of the parameter.
    """

    parameter: str
    kind: Kind
    names: tuple[str, ...] = ()


class _ReasoningFormat:
    def read(self, value: Any) -> str:
        name = Text().read(value)
        if name not in REASONING_FORMATS:
            raise Refusal(f"Unknown reasoning format: {name}")
        return name


_FLAG = Flag()
_FLOAT = Float32()
_INT = Integer()
_COUNT = Integer(low=0, is_hard=True)
_UNIT = Float32(low=0.0, high=1.0)

# The peer evaluates fields in this order, which decides which of several faults is reported.
FIELDS: tuple[Field, ...] = (
    Field("verbose", _FLAG),
    Field("timings_per_token", _FLAG),
    Field("stream", _FLAG),
    Field("cache_prompt", _FLAG),
    Field("return_tokens", _FLAG),
    Field("return_progress", _FLAG),
    Field("sse_ping_interval", Integer(low=-1, is_hard=True)),
    Field(
        "n_predict",
        Integer(low=-1, is_hard=True),
        ("n_predict", "max_completion_tokens", "max_tokens"),
    ),
    Field("n_indent", _COUNT),
    Field("n_keep", Integer(low=-1, is_hard=True)),
    Field("n_discard", _COUNT),
    Field("n_cmpl", _COUNT, ("n_cmpl", "n")),
    Field("n_cache_reuse", _COUNT),
    Field(
        "t_max_predict_ms",
        Integer(low=-1, high=INT64_MAX, is_hard=True, takes_boolean=False),
    ),
    Field("response_fields", LenientTexts()),
    Field("top_k", Integer(low=0)),
    Field("top_p", _UNIT),
    Field("min_p", _UNIT),
    Field("top_n_sigma", _FLOAT),
    Field("xtc_probability", _UNIT),
    Field("xtc_threshold", _UNIT),
    Field("typical_p", _FLOAT),
    Field("temperature", Float32(low=0.0)),
    Field("dynatemp_range", _FLOAT),
    Field("dynatemp_exponent", _FLOAT),
    Field("repeat_last_n", _COUNT),
    Field("repeat_penalty", _FLOAT),
    Field("frequency_penalty", _FLOAT),
    Field("presence_penalty", _FLOAT),
    Field("dry_multiplier", _FLOAT),
    Field("dry_base", _FLOAT),
    Field("dry_allowed_length", _COUNT),
    Field("dry_penalty_last_n", _COUNT),
    Field("mirostat", Integer(low=0, high=2)),
    Field("mirostat_tau", _FLOAT),
    Field("mirostat_eta", _FLOAT),
    Field("adaptive_target", Float32(high=1.0)),
    Field("adaptive_decay", Float32(low=0.0, high=0.99, is_hard=True)),
    Field("seed", Unsigned32()),
    Field("n_probs", _INT, ("n_probs", "logprobs")),
    Field("min_keep", _COUNT),
    Field("backend_sampling", _FLAG),
    Field("post_sampling_probs", _FLAG),
    Field("lora", Adapters()),
    Field("dry_sequence_breakers", Breakers()),
    Field("grammar_lazy", _FLAG),
    Field("reasoning_format", _ReasoningFormat()),
    Field("generation_prompt", Text()),
    Field("parse_tool_calls", _FLAG),
    Field("echo", _FLAG),
    Field("preserved_texts", Texts(), ("preserved_tokens",)),
    Field("grammar_triggers", Triggers()),
    Field("reasoning_control", _FLAG),
    Field("reasoning_budget_tokens", Integer(low=-1, is_hard=True)),
    Field("reasoning_start", Text(), ("reasoning_budget_start_tag",)),
    Field("reasoning_ends", Texts(), ("reasoning_budget_end_tags", "reasoning_budget_end_tag")),
    Field("reasoning_message", Text(), ("reasoning_budget_message",)),
    Field("logit_bias", Bias()),
    Field("ignore_eos", _FLAG),
    Field("stop", Stops()),
    Field("samplers", SamplerNames()),
)


_PLACES = {
    name: place for place, entry in enumerate(FIELDS) for name in entry.names or (entry.parameter,)
}


@dataclass(frozen=True)
class Limits:
    """What depends on the server: how many samples one request may ask for."""

    num_slots: int


def read_params(
    body: Mapping[str, Any], defaults: CompletionParams, limits: Limits
) -> CompletionParams:
    """Reads every known field; unknown keys are ignored.

    Raises:
        FieldError: a field is of a wrong type or beyond a hard limit.
    """
    given = _Reading(body)
    values: dict[str, Any] = {}
    for entry in _fields_of(body):
        kind = _count_of_samples(limits) if entry.parameter == "n_cmpl" else entry.kind
        value = given.read(entry.names or (entry.parameter,), kind)
        if value is not None:
            values[entry.parameter] = value
    values |= given.stream_options() | given.constraint()
    if values.get("dry_base", 1.0) < 1.0:
        del values["dry_base"]
    if not values.get("stop"):
        values.pop("stop", None)
    if "logit_bias" in values:
        values["is_eos_banned"] = False
    if "ignore_eos" in values:
        values["is_eos_banned"] = values["ignore_eos"]
    if values.get("grammar_triggers") == () and values.get("grammar_lazy"):
        raise FieldError("grammar_triggers", "Error: no triggers set for lazy grammar!")
    # As `replace` would, which asks for each of the sixty fields by name.
    return CompletionParams(**vars(defaults) | values)


def _fields_of(body: Mapping[str, Any]) -> list[Field]:
    """Those that a body may have, in their order: of some sixty it names a few."""
    return [FIELDS[place] for place in sorted({_PLACES[name] for name in body if name in _PLACES})]


def _count_of_samples(limits: Limits) -> Integer:
    return Integer(low=1, high=limits.num_slots, is_hard=True)


@dataclass(frozen=True)
class _Reading:
    """A body, whose null members count as absent."""

    body: Mapping[str, Any]

    def has(self, name: str) -> bool:
        return self.body.get(name) is not None

    def read(self, names: tuple[str, ...], kind: Kind) -> Any:
        for name in names:
            if self.has(name):
                try:
                    return kind.read(self.body[name])
                except Refusal as refusal:
                    raise FieldError(name, str(refusal)) from refusal
        return None

    def stream_options(self) -> dict[str, Any]:
        options = self.body.get("stream_options")
        if not isinstance(options, Mapping):
            return {}
        members = cast("Mapping[str, Any]", options)
        value = _Reading(members).read(("include_usage",), _FLAG)
        return {} if value is None else {"include_usage": value}

    def constraint(self) -> dict[str, Any]:
        """A grammar or a schema. The mere presence of `grammar`, null included, hides a schema."""
        if "grammar" in self.body:
            value = self.body["grammar"]
            return {} if value is None else {"grammar": LenientText().read(value)}
        schema = self.body.get("json_schema")
        if schema is None:
            return {}
        return {"json_schema": {"type": "object"} if schema == {} else schema}

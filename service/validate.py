"""Range checks of every request field, before anything reaches the engine.

The RPC is strict: nothing is clamped and nothing has a silent default. All faults of a request
are collected and reported together, each naming field, value and limit. This module only looks;
turning messages into engine types is `service.convert`'s.

Example:
    >>> faults = Faults()
    >>> faults.number("sampling.top_p", 1.5, low=0.0, high=1.0)
    >>> faults.raise_if_any()
    Traceback (most recent call last):
    engine.errors.InvalidField: sampling.top_p: 1.5 is not between 0 and 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from kvarts.v1 import common_pb2, generation_pb2

from engine.errors import ContextOverflow, InvalidField, TokenNotInVocab
from service import telemetry
from service.errors import InvalidFields

MAX_INT32 = 2**31 - 1
MAX_STOPS = 256
MAX_STOP_BYTES = 4096
MAX_BREAKERS = 256
MAX_BREAKER_BYTES = 40
MAX_SAMPLERS = 64
MAX_ANNOTATION_BYTES = 4096
MAX_PRESERVED_TOKENS = 65_536
MAX_TRIGGERS = 256
# Source: google.protobuf.Duration, +-10,000 years.
_MAX_DURATION_S = 315_576_000_000
_MAX_NANOS = 999_999_999
# A description shows this much of an offending text.
_SHOWN_CHARS = 40


@dataclass(frozen=True)
class Limits:
    """What bounds the fields of a request to a loaded model."""

    num_slots: int
    vocab_size: int
    context_tokens: int


class Faults:
    """The faults found so far in one request."""

    def __init__(self) -> None:
        self._found: list[InvalidField] = []

    def add(self, field: str, description: str) -> None:
        """Records one fault."""
        self._found.append(InvalidField(field=field, description=description))

    def number(
        self,
        field: str,
        value: float,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        excludes_low: bool = False,
    ) -> None:
        """Records a number that is not finite or not between `low` and `high`."""
        if not math.isfinite(value):
            self.add(field, f"{value} is not a finite number")
        elif value < low or value > high or (excludes_low and value == low):
            self.add(field, f"{value:.9g} is not {_range(low, high, excludes_low)}")

    def size(self, field: str, size: int, limit: int, unit: str) -> None:
        """Records a list, map or text that is longer than `limit`."""
        if size > limit:
            self.add(field, f"{size} {unit}, limit {limit}")

    def known(self, field: str, value: int, names: Iterable[int], *, may_be_unset: bool) -> None:
        """Records an enum value that the contract does not have."""
        if value == 0 and may_be_unset:
            return
        legal = [number for number in names if number != 0]
        if value not in legal:
            self.add(field, f"{value} is none of the values {legal[0]} to {legal[-1]}")

    def raise_if_any(self) -> None:
        """Raises what was recorded.

        Raises:
            InvalidField: One fault.
            InvalidFields: Several.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise InvalidFields(tuple(self._found))


def check_request_id(faults: Faults, request_id: str) -> None:
    """An id of a caller: empty, or 1 to 36 printable ASCII characters without spaces."""
    if request_id and not telemetry.is_request_id(request_id):
        faults.add("request_id", f"{shown(request_id)} is not 1 to 36 printable ASCII characters")


def check_generate(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    """Checks everything of a generation that needs no tokenizer.

    Raises:
        InvalidField: One field is out of range.
        InvalidFields: Several are.
        TokenNotInVocab: A token id at or past the end of the vocabulary.
        ContextOverflow: More prompt tokens than a slot's context holds.
    """
    faults = Faults()
    check_request_id(faults, request.request_id)
    if request.WhichOneof("prompt") is None:
        faults.add("prompt", "missing: one of text, tokens, chat is required")
    _check_sampling(faults, request.sampling, limits)
    _check_budget(faults, request, limits)
    _check_texts(faults, request)
    _check_constraint(faults, request)
    check_adapters(faults, "adapters", request.adapters)
    if request.HasField("chat"):
        check_chat(faults, "chat", request.chat)
    faults.raise_if_any()
    check_vocab(request.preserved_tokens, limits.vocab_size)
    check_vocab(request.sampling.logit_bias, limits.vocab_size)
    check_prompt(request.tokens.ids, limits)


def check_prompt(tokens: Sequence[int], limits: Limits) -> None:
    """Checks token ids given as a prompt.

    Raises:
        ContextOverflow: More than a slot's context holds.
        TokenNotInVocab: An id at or past the end of the vocabulary.
    """
    if len(tokens) > limits.context_tokens:
        raise ContextOverflow(prompt_tokens=len(tokens), context_tokens=limits.context_tokens)
    check_vocab(tokens, limits.vocab_size)


def check_vocab(tokens: Iterable[int], vocab_size: int) -> None:
    """Checks token ids against the vocabulary.

    Raises:
        TokenNotInVocab: The largest id is at or past its end.
    """
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise TokenNotInVocab(token_id=largest, vocab_size=vocab_size)


def check_adapters(faults: Faults, field: str, adapters: common_pb2.AdapterScales) -> None:
    """A set names each adapter once, with a finite scale; ids are looked up by the engine."""
    seen: set[int] = set()
    for i, entry in enumerate(adapters.scales):
        if not entry.HasField("adapter_id"):
            faults.add(f"{field}.scales[{i}].adapter_id", "missing")
        elif entry.adapter_id in seen:
            faults.add(f"{field}.scales[{i}].adapter_id", f"{entry.adapter_id} is named twice")
        if not entry.HasField("scale"):
            faults.add(f"{field}.scales[{i}].scale", "missing")
        else:
            faults.number(f"{field}.scales[{i}].scale", entry.scale)
        seen.add(entry.adapter_id)


def check_chat(faults: Faults, field: str, chat: common_pb2.ChatPrompt) -> None:
    """The shape of a conversation; whether the template takes it is the template's to say."""
    for i, message in enumerate(chat.messages):
        name = f"{field}.messages[{i}]"
        if not message.role:
            faults.add(f"{name}.role", "missing")
        if message.WhichOneof("body") is None and not message.tool_calls:
            faults.add(f"{name}.content", "missing, and there are no tool_calls")
        for j, part in enumerate(message.parts.parts):
            if part.WhichOneof("part") is None:
                faults.add(f"{name}.parts.parts[{j}]", "empty: text is required")
        for j, call in enumerate(message.tool_calls):
            if not call.name:
                faults.add(f"{name}.tool_calls[{j}].name", "missing")
    _check_tools(faults, field, chat)
    faults.known(
        f"{field}.final_message",
        chat.final_message,
        common_pb2.FinalMessage.values(),
        may_be_unset=True,
    )
    continues = chat.final_message > common_pb2.FINAL_MESSAGE_CLOSED
    if continues and chat.HasField("add_generation_prompt") and chat.add_generation_prompt:
        faults.add(
            f"{field}.add_generation_prompt", "true together with a final_message that continues"
        )


def check_duration(faults: Faults, field: str, duration: Duration) -> None:
    """A duration that must be positive and well formed."""
    is_formed = (
        abs(duration.seconds) <= _MAX_DURATION_S
        and abs(duration.nanos) <= _MAX_NANOS
        and duration.seconds * duration.nanos >= 0
    )
    if not is_formed:
        faults.add(
            field, f"{duration.seconds} s and {duration.nanos} ns are not a well-formed duration"
        )
    elif duration.seconds <= 0 and duration.nanos <= 0:
        faults.add(field, f"{duration.seconds + duration.nanos / 1e9:.9g} s is not above 0 s")


def shown(text: str) -> str:
    """Returns the beginning of a caller's text, quoted and in plain ASCII, for a message."""
    return ascii(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


# Field of SamplingParams -> (low, high, whether low itself is refused). Source: the contract's
# field comments; a gateway that clamps does so before it calls.
_FLOAT_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, False),
    "dynatemp_range": (0.0, math.inf, False),
    "dynatemp_exponent": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, math.inf, False),
    "top_n_sigma": (-math.inf, math.inf, False),
    "xtc_probability": (0.0, 1.0, False),
    "xtc_threshold": (0.0, 1.0, False),
    "repeat_penalty": (0.0, math.inf, True),
    "frequency_penalty": (-math.inf, math.inf, False),
    "presence_penalty": (-math.inf, math.inf, False),
    "dry_multiplier": (0.0, math.inf, False),
    "dry_base": (1.0, math.inf, False),
    "mirostat_tau": (0.0, math.inf, False),
    "mirostat_eta": (0.0, math.inf, False),
    "adaptive_target": (-math.inf, 1.0, False),
    # The nearest float to 0.99 lies above it.
    "adaptive_decay": (0.0, 0.9900000095367432, False),
}
_COUNTS = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep")


def _check_sampling(
    faults: Faults, sampling: generation_pb2.SamplingParams, limits: Limits
) -> None:
    for field, value in sampling.ListFields():
        if field.name in _FLOAT_RANGES:
            low, high, excludes_low = _FLOAT_RANGES[field.name]
            faults.number(
                f"sampling.{field.name}", value, low=low, high=high, excludes_low=excludes_low
            )
    for name in _COUNTS:
        count: int = getattr(sampling, name)
        faults.number(f"sampling.{name}", count, low=0, high=MAX_INT32)
    faults.known(
        "sampling.mirostat",
        sampling.mirostat,
        generation_pb2.Mirostat.values(),
        may_be_unset=True,
    )
    _check_samplers(faults, sampling.samplers.samplers)
    _check_breakers(faults, sampling.dry_sequence_breakers.values)
    _check_bias(faults, sampling, limits)


def _check_samplers(faults: Faults, samplers: Sequence[int]) -> None:
    faults.size("sampling.samplers.samplers", len(samplers), MAX_SAMPLERS, "samplers")
    for i, sampler in enumerate(samplers[:MAX_SAMPLERS]):
        faults.known(
            f"sampling.samplers.samplers[{i}]",
            sampler,
            generation_pb2.Sampler.values(),
            may_be_unset=False,
        )


def _check_breakers(faults: Faults, breakers: Sequence[str]) -> None:
    field = "sampling.dry_sequence_breakers.values"
    faults.size(field, len(breakers), MAX_BREAKERS, "texts")
    for i, breaker in enumerate(breakers[:MAX_BREAKERS]):
        size = len(breaker.encode())
        if not 1 <= size <= MAX_BREAKER_BYTES:
            faults.add(f"{field}[{i}]", f"{size} bytes is not between 1 and {MAX_BREAKER_BYTES}")


def _check_bias(faults: Faults, sampling: generation_pb2.SamplingParams, limits: Limits) -> None:
    bias = sampling.logit_bias
    if len(bias) > limits.vocab_size:
        faults.size("sampling.logit_bias", len(bias), limits.vocab_size, "entries")
        return
    for token_id, value in bias.items():
        if math.isnan(value) or value == math.inf:
            faults.add(f"sampling.logit_bias[{token_id}]", f"{value} is neither finite nor -inf")


def _check_budget(faults: Faults, request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    faults.number("max_tokens", request.max_tokens, low=0, high=MAX_INT32)
    faults.number("top_logprobs", request.top_logprobs, low=0, high=limits.vocab_size)
    faults.number("num_samples", request.num_samples, low=0, high=limits.num_slots)
    faults.number("n_keep", request.n_keep, low=-1, high=MAX_INT32)
    faults.number("n_discard", request.n_discard, low=0, high=MAX_INT32)
    faults.number("n_cache_reuse", request.n_cache_reuse, low=0, high=MAX_INT32)
    faults.number("n_indent", request.n_indent, low=0, high=MAX_INT32)
    if request.HasField("time_limit"):
        check_duration(faults, "time_limit", request.time_limit)
    if request.HasField("slot_id") and request.num_samples > 1:
        faults.add("slot_id", "names one slot, but num_samples asks for several")


def _check_texts(faults: Faults, request: generation_pb2.GenerateRequest) -> None:
    faults.size("stop", len(request.stop), MAX_STOPS, "texts")
    for i, stop in enumerate(request.stop[:MAX_STOPS]):
        faults.size(f"stop[{i}]", len(stop.encode()), MAX_STOP_BYTES, "bytes")
    faults.size("annotation", len(request.annotation.encode()), MAX_ANNOTATION_BYTES, "bytes")
    faults.size("preserved_tokens", len(request.preserved_tokens), MAX_PRESERVED_TOKENS, "tokens")


def _check_constraint(faults: Faults, request: generation_pb2.GenerateRequest) -> None:
    if request.grammar_lazy and request.WhichOneof("constraint") is None:
        faults.add("grammar_lazy", "true without a grammar or a json_schema")
    if request.grammar_lazy and not request.grammar_triggers:
        faults.add("grammar_triggers", "empty, but grammar_lazy needs at least one")
    for i, trigger in enumerate(request.grammar_triggers[:MAX_TRIGGERS]):
        if trigger.WhichOneof("trigger") is None:
            faults.add(f"grammar_triggers[{i}]", "empty")
    faults.size("grammar_triggers", len(request.grammar_triggers), MAX_TRIGGERS, "triggers")
    reasoning = request.reasoning
    faults.known(
        "reasoning.format",
        reasoning.format,
        generation_pb2.ReasoningFormat.values(),
        may_be_unset=True,
    )
    faults.number("reasoning.budget_tokens", reasoning.budget_tokens, low=-1, high=MAX_INT32)


def _check_tools(faults: Faults, field: str, chat: common_pb2.ChatPrompt) -> None:
    faults.known(
        f"{field}.tool_choice",
        chat.tool_choice,
        common_pb2.ToolChoice.values(),
        may_be_unset=True,
    )
    names: set[str] = set()
    for i, tool in enumerate(chat.tools):
        if not tool.name:
            faults.add(f"{field}.tools[{i}].name", "missing")
        elif tool.name in names:
            faults.add(f"{field}.tools[{i}].name", f"{shown(tool.name)} is named twice")
        names.add(tool.name)
    if chat.tool_choice == common_pb2.TOOL_CHOICE_REQUIRED and not chat.tools:
        faults.add(f"{field}.tool_choice", "REQUIRED without tools")


def _range(low: float, high: float, excludes_low: bool) -> str:
    if high == math.inf:
        return f"above {low:.9g}" if excludes_low else f"at least {low:.9g}"
    if low == -math.inf:
        return f"at most {high:.9g}"
    return f"between {low:.9g} and {high:.9g}"

"""From parameters in the peer's terms to the strict calls of the service.

What the peer tolerates and the service does not is settled here, where it changes nothing: a
negative range is 0, a slot id wraps, an overlong sequence breaker is cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration
from kvarts.v1 import common_pb2, generation_pb2, tokenization_pb2

from gateway import fields, peer_json
from gateway.adapters import KnownAdapters, known_adapters
from gateway.backend import Backend
from gateway.errors import ApiError, ErrorKind, FieldError, invalid
from gateway.facts import SAMPLER_VALUES, Facts
from gateway.fields import Trigger, lenient_integer
from gateway.off_loop import extend
from gateway.prompts import Prompt, tokenize
from gateway.schema import RANDOM_SEED, BiasEntry, CompletionParams
from gateway.service import answer
from gateway.settings import long_settings, short_settings

_MIROSTAT = (
    generation_pb2.MIROSTAT_OFF,
    generation_pb2.MIROSTAT_V1,
    generation_pb2.MIROSTAT_V2,
)
_REASONING_FORMATS = {
    "none": generation_pb2.REASONING_FORMAT_NONE,
    "auto": generation_pb2.REASONING_FORMAT_AUTO,
    "deepseek": generation_pb2.REASONING_FORMAT_DEEPSEEK,
    "deepseek-legacy": generation_pb2.REASONING_FORMAT_DEEPSEEK_LEGACY,
}
_MAX_BREAKER_BYTES = 40
_NO_TOKEN = 2**32 - 1
_MAX_ANNOTATION_BYTES = 4096
_NO_ADAPTERS = KnownAdapters()


@dataclass(frozen=True)
class Resolved:
    """Parameters whose texts have become tokens. `bias` includes the ban of `ignore_eos`."""

    params: CompletionParams
    bias: tuple[tuple[int, float], ...]
    preserved: tuple[int, ...]
    adapters: KnownAdapters = _NO_ADAPTERS

    def settings(self) -> dict[str, peer_json.Json]:
        """The `generation_settings` that an answer shows."""
        return long_settings(self.params, bias=self.bias, preserved=self.preserved)


@dataclass(frozen=True)
class Job:
    """One sample of one prompt. `is_sibling`: not the first sample of its prompt.

    `message` makes the call's message, when its turn has come: each holds all of the body that
    its samples share, grammar, stops and biases.
    """

    index: int
    prompt: tuple[int, ...]
    resolved: Resolved
    message: Callable[[], generation_pb2.GenerateRequest]
    is_sibling: bool

    @property
    def params(self) -> CompletionParams:
        """The parameters, with this sample's own seed."""
        return self.resolved.params


def check_params(params: CompletionParams) -> None:
    """Refuses what the peer refuses when it builds the chain.

    Raises:
        ApiError: 400 for a penalty that is not positive.
    """
    if params.repeat_penalty <= 0:
        raise invalid(
            "Failed to initialize samplers: penalty_repeat must be finite and greater than 0"
        )


async def resolve(backend: Backend, params: CompletionParams) -> Resolved:
    """Turns what was given as text into token ids, a schema into a grammar; finds the adapters.

    Raises:
        ModelChanged: another model is served than the one that is known.
        ApiError: the service refused a call or is gone.
    """
    if params.json_schema is not None:
        params = await _with_schema(backend, params)
    # One after another: most requests have none of these, and a task for each would cost them all.
    bias = await _resolve_bias(backend, params.logit_bias)
    preserved = await _resolve_preserved(backend, params.preserved_texts)
    adapters = await known_adapters(backend.service, params.lora, backend.metadata)
    if params.grammar_triggers:
        triggers = await _resolve_triggers(backend, params.grammar_triggers, preserved)
        params = dataclasses.replace(params, grammar_triggers=triggers)
    if params.is_eos_banned:
        bias += backend.facts.eog_bias
    return Resolved(params, bias, preserved, adapters)


def make_jobs(
    facts: Facts,
    body: Mapping[str, Any],
    resolved: Resolved,
    prompts: Sequence[tuple[int, ...]],
    chat: common_pb2.ChatPrompt | None = None,
    *,
    shows_prompt: bool = False,
) -> list[Job]:
    """One job per prompt and sample, in the order of their indexes.

    With `shows_prompt` the end of each brings the prompt's text.
    Where the one prompt is a conversation, that is sent: the service then tells what the answer's
    text adds to its message.
    """
    jobs: list[Job] = []
    slot_id = _slot_id(body, facts.info.num_slots)
    for prompt in prompts:
        for sample in range(resolved.params.n_cmpl):
            job = dataclasses.replace(resolved, params=_nth_sample(resolved.params, sample))
            # Siblings of a pinned sample would only wait for each other.
            pinned = slot_id if sample == 0 else None
            message = partial(_message, facts, job, prompt, pinned, chat, shows_prompt=shows_prompt)
            jobs.append(Job(len(jobs), prompt, job, message, is_sibling=sample > 0))
    return jobs


def _message(
    facts: Facts,
    job: Resolved,
    prompt: tuple[int, ...],
    slot_id: int | None,
    chat: common_pb2.ChatPrompt | None,
    *,
    shows_prompt: bool,
) -> generation_pb2.GenerateRequest:
    request = _request(facts, job, prompt, slot_id)
    request.return_prompt_text = shows_prompt
    if chat is not None:
        _ask_for_message(request, job.params, chat)
    return request


def _ask_for_message(
    request: generation_pb2.GenerateRequest, params: CompletionParams, chat: common_pb2.ChatPrompt
) -> None:
    request.chat.CopyFrom(chat)
    # The tags are the template's.
    request.reasoning.Clear()
    request.reasoning.format = _REASONING_FORMATS[params.reasoning_format]
    if params.reasoning_budget_tokens >= 0:
        request.reasoning.budget_tokens = params.reasoning_budget_tokens
    if params.reasoning_message is not None:
        request.reasoning.budget_message = params.reasoning_message
    if params.json_schema is not None:
        request.json_schema = peer_json.write(params.json_schema).decode()
        request.lenient_schema = True
    if params.grammar:
        # As in the peer, a format of the answer leaves no room for calls.
        request.chat.tool_choice = common_pb2.TOOL_CHOICE_NONE


def _nth_sample(params: CompletionParams, sample: int) -> CompletionParams:
    if params.seed == RANDOM_SEED:
        return params
    return dataclasses.replace(params, seed=(params.seed + sample) % 2**32)


def _slot_id(body: Mapping[str, Any], num_slots: int) -> int | None:
    slot_id = lenient_integer(body.get("id_slot"), -1)
    return wrap_slot_id(slot_id, num_slots) if slot_id != -1 else None


def wrap_slot_id(slot_id: int, num_slots: int) -> int:
    """The slot that an id means: modulo the count, as an unsigned 64-bit number."""
    return slot_id % 2**64 % num_slots


def _request(
    facts: Facts, resolved: Resolved, prompt: tuple[int, ...], slot_id: int | None
) -> generation_pb2.GenerateRequest:
    params = resolved.params
    request = generation_pb2.GenerateRequest(
        tokens=common_pb2.TokenIds(),
        sampling=_sampling(resolved),
        stop=params.stop,
        ignore_eos=params.is_eos_banned,
        cache_prompt=params.cache_prompt,
        n_keep=params.n_keep,
        n_discard=params.n_discard,
        n_cache_reuse=params.n_cache_reuse,
        n_indent=params.n_indent,
        preserved_tokens=resolved.preserved,
        return_progress=params.return_progress and params.stream,
        post_sampling_probs=params.post_sampling_probs,
        annotation=_annotation(params),
        vocabulary=facts.model.vocabulary,
    )
    extend(request.tokens.ids, prompt)
    if params.token_limit is not None:
        request.max_tokens = params.token_limit
    if params.n_probs > 0:
        request.top_logprobs = min(params.n_probs, facts.model.vocab_size)
    if params.t_max_predict_ms > 0:
        request.time_limit.CopyFrom(_milliseconds(params.t_max_predict_ms))
    if slot_id is not None:
        request.slot_id = slot_id
    if params.lora:
        # Also where none of them is loaded: an explicit set turns the others off.
        request.adapters.CopyFrom(resolved.adapters.message)
    _limit_reasoning(request.reasoning, params)
    # An empty one is none, whatever the server's own is.
    request.grammar = params.grammar
    if params.grammar and params.grammar_lazy:
        request.grammar_lazy = True
        request.grammar_triggers.extend(map(_trigger, params.grammar_triggers))
    return request


def _limit_reasoning(reasoning: generation_pb2.ReasoningParams, params: CompletionParams) -> None:
    """Limits thinking between a client's own tags; without any the limit has no meaning."""
    ends = [end for end in params.reasoning_ends if end]
    if not (params.reasoning_start and ends):
        return
    reasoning.start_tag = params.reasoning_start
    reasoning.end_tags.extend(ends)
    reasoning.budget_tokens = params.reasoning_budget_tokens
    reasoning.budget_message = params.reasoning_message or ""


def _trigger(trigger: Trigger) -> generation_pb2.GrammarTrigger:
    match trigger.kind:
        case fields.TRIGGER_TOKEN:
            # What is no id at all is refused like an id that there is not.
            token = -1 if trigger.token is None else trigger.token
            known = token if 0 <= token < _NO_TOKEN else _NO_TOKEN
            return generation_pb2.GrammarTrigger(token_id=known)
        case fields.TRIGGER_WORD:
            return generation_pb2.GrammarTrigger(word=trigger.value)
        case fields.TRIGGER_PATTERN:
            return generation_pb2.GrammarTrigger(pattern=trigger.value)
        case _:
            return generation_pb2.GrammarTrigger(full_pattern=trigger.value)


def _sampling(resolved: Resolved) -> generation_pb2.SamplingParams:
    params = resolved.params
    sampling = generation_pb2.SamplingParams(
        temperature=params.temperature,
        dynatemp_range=max(0.0, params.dynatemp_range),
        dynatemp_exponent=params.dynatemp_exponent,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=max(0.0, params.typical_p),
        top_n_sigma=params.top_n_sigma,
        xtc_probability=params.xtc_probability,
        xtc_threshold=params.xtc_threshold,
        repeat_last_n=params.repeat_last_n,
        repeat_penalty=params.repeat_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        dry_multiplier=params.dry_multiplier,
        dry_base=params.dry_base,
        dry_allowed_length=params.dry_allowed_length,
        dry_penalty_last_n=params.dry_penalty_last_n,
        dry_sequence_breakers=common_pb2.StringList(values=_breakers(params.dry_sequence_breakers)),
        mirostat=_MIROSTAT[params.mirostat],
        mirostat_tau=params.mirostat_tau,
        mirostat_eta=params.mirostat_eta,
        adaptive_target=params.adaptive_target,
        adaptive_decay=params.adaptive_decay,
        min_keep=params.min_keep,
        logit_bias=_summed(resolved.bias),
        samplers=generation_pb2.SamplerChain(
            samplers=[SAMPLER_VALUES[name] for name in params.samplers]
        ),
    )
    if params.seed != RANDOM_SEED:
        sampling.seed = params.seed
    return sampling


def _summed(bias: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Adds up what one token is given several times, within a float's range."""
    sums: dict[int, float] = {}
    for token, value in bias:
        total = sums.get(token, 0.0) + value
        sums[token] = total if math.isinf(total) else peer_json.to_float32(total)
    return sums


def _breakers(breakers: Sequence[str]) -> list[str]:
    """Cuts breakers to the peer's length, at a character, and drops empty ones."""
    cut = (text.encode()[:_MAX_BREAKER_BYTES].decode(errors="ignore") for text in breakers)
    return [text for text in cut if text]


def _annotation(params: CompletionParams) -> str:
    """The settings as `/slots` shows them; nothing where they are longer than the service keeps.

    They are for everybody, so without the text that a conversation may have opened the answer with.
    """
    text = peer_json.write(short_settings(params) | {"generation_prompt": ""})
    return text.decode() if len(text) <= _MAX_ANNOTATION_BYTES else ""


def _milliseconds(count: int) -> Duration:
    # A Duration ends at 10,000 years; nobody can tell that from no limit.
    seconds = min(count // 1000, 315_576_000_000)
    return Duration(seconds=seconds, nanos=count % 1000 * 1_000_000)


async def _resolve_bias(
    backend: Backend, entries: Sequence[BiasEntry]
) -> tuple[tuple[int, float], ...]:
    vocab_size = backend.facts.model.vocab_size
    bias: list[tuple[int, float]] = []
    for target, value in entries:
        if isinstance(target, str):
            tokens = await _plain_tokens(backend, target, parse_special=False)
        else:
            tokens = (target,) if 0 <= target < vocab_size else ()
        bias.extend((token, value) for token in tokens)
    return tuple(bias)


async def _resolve_preserved(backend: Backend, texts: Sequence[str]) -> tuple[int, ...]:
    preserved: set[int] = set()
    for text in texts:
        tokens = await _plain_tokens(backend, text, parse_special=True)
        if len(tokens) == 1:
            preserved.add(tokens[0])
    return tuple(sorted(preserved))


async def _resolve_triggers(
    backend: Backend, triggers: Sequence[Trigger], preserved: Sequence[int]
) -> tuple[Trigger, ...]:
    """Turns words that are one token into that token, which must be shown."""
    resolved: list[Trigger] = []
    for trigger in triggers:
        tokens: tuple[int, ...] = ()
        if trigger.kind == fields.TRIGGER_WORD:
            tokens = await _plain_tokens(backend, trigger.value, parse_special=True)
        if len(tokens) == 1:
            if tokens[0] not in preserved:
                problem = "Grammar trigger word should be marked as preserved token"
                raise invalid(str(FieldError("grammar_triggers", f"{problem}: {trigger.value}")))
            trigger = Trigger(fields.TRIGGER_TOKEN, trigger.value, tokens[0])
        resolved.append(trigger)
    return tuple(resolved)


async def _with_schema(backend: Backend, params: CompletionParams) -> CompletionParams:
    """Puts the grammar of the schema in its place."""
    request = tokenization_pb2.ConvertJsonSchemaRequest(
        json_schema=peer_json.write(params.json_schema).decode()
    )
    try:
        call = backend.service.tokenization.ConvertJsonSchema(request, metadata=backend.metadata)
        converted = await answer(call)
    except ApiError as error:
        if error.body.kind is not ErrorKind.INVALID_REQUEST:
            raise
        message = str(FieldError("json_schema", f'"json_schema": {error.body.message}'))
        raise ApiError(error.body.kind, message, headers=error.body.headers) from error
    return dataclasses.replace(params, grammar=converted.grammar)


async def _plain_tokens(backend: Backend, text: str, *, parse_special: bool) -> tuple[int, ...]:
    prompt = Prompt((text,))
    return await tokenize(backend, prompt, add_special=False, parse_special=parse_special)

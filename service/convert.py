"""Messages to engine types and back: the only place that knows both.

Inputs are already checked (`service.validate`); nothing here looks at a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from google.protobuf.duration_pb2 import Duration
from kvarts.v1 import common_pb2, generation_pb2, model_pb2, rebuild_pb2, slot_pb2

from engine.constraint import Constraint
from engine.requests import (
    AdapterScale,
    Mirostat,
    ReasoningBudget,
    Request,
    Sampler,
    SamplingParams,
)
from engine.scheduling.wishes import RestoredSlot, SavedSlot
from engine.types import (
    CacheSource,
    Chunk,
    Counters,
    Finished,
    FinishReason,
    PoolInfo,
    PoolKind,
    Progress,
    SlotInfo,
    SlotState,
    Started,
    TokenLogprobs,
)
from service.defaults import GenerationDefaults

_RANDOM_SEED = 2**32 - 1

REASONING_FORMATS: Mapping[str, generation_pb2.ReasoningFormat.ValueType] = {
    "none": generation_pb2.REASONING_FORMAT_NONE,
    "auto": generation_pb2.REASONING_FORMAT_AUTO,
    "deepseek": generation_pb2.REASONING_FORMAT_DEEPSEEK,
    "deepseek-legacy": generation_pb2.REASONING_FORMAT_DEEPSEEK_LEGACY,
}

_SAMPLERS: Mapping[Sampler, generation_pb2.Sampler.ValueType] = {
    Sampler.PENALTIES: generation_pb2.SAMPLER_PENALTIES,
    Sampler.DRY: generation_pb2.SAMPLER_DRY,
    Sampler.TOP_N_SIGMA: generation_pb2.SAMPLER_TOP_N_SIGMA,
    Sampler.TOP_K: generation_pb2.SAMPLER_TOP_K,
    Sampler.TYPICAL_P: generation_pb2.SAMPLER_TYPICAL_P,
    Sampler.TOP_P: generation_pb2.SAMPLER_TOP_P,
    Sampler.MIN_P: generation_pb2.SAMPLER_MIN_P,
    Sampler.XTC: generation_pb2.SAMPLER_XTC,
    Sampler.TEMPERATURE: generation_pb2.SAMPLER_TEMPERATURE,
    Sampler.INFILL: generation_pb2.SAMPLER_INFILL,
    Sampler.ADAPTIVE_P: generation_pb2.SAMPLER_ADAPTIVE_P,
}
_SAMPLERS_BACK = {number: sampler for sampler, number in _SAMPLERS.items()}
_MIROSTAT: Mapping[Mirostat, generation_pb2.Mirostat.ValueType] = {
    Mirostat.OFF: generation_pb2.MIROSTAT_OFF,
    Mirostat.V1: generation_pb2.MIROSTAT_V1,
    Mirostat.V2: generation_pb2.MIROSTAT_V2,
}
_MIROSTAT_BACK = {number: mirostat for mirostat, number in _MIROSTAT.items()}
_REASONS: Mapping[FinishReason, generation_pb2.FinishReason.ValueType] = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_FULL: generation_pb2.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME: generation_pb2.FINISH_REASON_TIME,
    FinishReason.INDENT: generation_pb2.FINISH_REASON_INDENT,
    FinishReason.EMPTY_PROMPT: generation_pb2.FINISH_REASON_EMPTY_PROMPT,
}
_SOURCES: Mapping[CacheSource, generation_pb2.CacheSource.ValueType] = {
    CacheSource.NONE: generation_pb2.CACHE_SOURCE_NONE,
    CacheSource.SLOT: generation_pb2.CACHE_SOURCE_SLOT,
    CacheSource.INDEX: generation_pb2.CACHE_SOURCE_INDEX,
    CacheSource.HOST: generation_pb2.CACHE_SOURCE_HOST,
}
_SLOT_STATES: Mapping[SlotState, slot_pb2.SlotState.ValueType] = {
    SlotState.IDLE: slot_pb2.SLOT_STATE_IDLE,
    SlotState.PREFILL: slot_pb2.SLOT_STATE_PREFILL,
    SlotState.DECODE: slot_pb2.SLOT_STATE_DECODE,
    SlotState.TRANSFER: slot_pb2.SLOT_STATE_TRANSFER,
}
_POOLS: Mapping[PoolKind, rebuild_pb2.PoolKind.ValueType] = {
    PoolKind.KV: rebuild_pb2.POOL_KIND_KV,
    PoolKind.SWA: rebuild_pb2.POOL_KIND_SWA,
    PoolKind.MAMBA: rebuild_pb2.POOL_KIND_MAMBA,
    PoolKind.MOE_CACHE: rebuild_pb2.POOL_KIND_MOE_CACHE,
}
# Fields of SamplingParams that are one number here and there, under one name.
_NUMBERS = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "repeat_last_n",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
    "min_keep",
)


def to_requests(
    message: generation_pb2.GenerateRequest,
    *,
    request_id: str,
    prompt: Sequence[int],
    defaults: GenerationDefaults,
    deadline_s: float | None,
    tenant: str,
    constraint: Constraint | None = None,
    reasoning: ReasoningBudget | None = None,
) -> tuple[Request, ...]:
    """Builds one engine request per sample, seeds rising by 1 (contract 2.2, `n`).

    The first keeps the caller's id; the others append their number to it.
    """
    sampling = to_sampling(message.sampling, defaults.sampling)
    first = Request(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else defaults.max_tokens,
        stop=tuple(message.stop) or defaults.stop,
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else defaults.ignore_eos,
        slot_id=message.slot_id if message.HasField("slot_id") else None,
        cache_prompt=(
            message.cache_prompt if message.HasField("cache_prompt") else defaults.cache_prompt
        ),
        n_keep=message.n_keep if message.HasField("n_keep") else defaults.n_keep,
        n_discard=message.n_discard,
        n_cache_reuse=(
            message.n_cache_reuse if message.HasField("n_cache_reuse") else defaults.n_cache_reuse
        ),
        n_indent=message.n_indent,
        time_limit_s=_seconds(message.time_limit) if message.HasField("time_limit") else None,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        post_sampling_probs=message.post_sampling_probs,
        preserved_tokens=frozenset(message.preserved_tokens),
        render_special=(
            message.render_special
            if message.HasField("render_special")
            else defaults.render_special
        ),
        adapters=to_adapters(message.adapters) if message.HasField("adapters") else None,
        progress=message.return_progress,
        deadline_s=deadline_s,
        tenant=tenant,
        annotation=message.annotation,
        group=_group(message, tenant, request_id),
        constraint=constraint,
        reasoning=reasoning,
    )
    return tuple(_sample(first, i) for i in range(max(1, message.num_samples)))


def to_sampling(message: generation_pb2.SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """Fills what a message leaves out from the defaults."""
    present = {field.name: value for field, value in message.ListFields()}
    changes = {name: present[name] for name in _NUMBERS if name in present}
    if "seed" in present:
        changes["seed"] = None if message.seed == _RANDOM_SEED else message.seed
    if message.mirostat:
        changes["mirostat"] = _MIROSTAT_BACK[message.mirostat]
    if "dry_sequence_breakers" in present:
        changes["dry_sequence_breakers"] = tuple(message.dry_sequence_breakers.values)
    if message.logit_bias:
        changes["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if "samplers" in present:
        changes["samplers"] = tuple(_SAMPLERS_BACK[number] for number in message.samplers.samplers)
    return replace(defaults, **changes)


def to_adapters(message: common_pb2.AdapterScales) -> tuple[AdapterScale, ...]:
    """Returns the entries of a set, in the caller's order."""
    return tuple(AdapterScale(entry.adapter_id, entry.scale) for entry in message.scales)


def from_started(event: Started, request_id: str, index: int) -> generation_pb2.Started:
    """A request was admitted."""
    return generation_pb2.Started(
        request_id=request_id,
        slot_id=event.slot_id,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        adapters=from_adapters(event.adapters),
        cache_source=_SOURCES[event.cache_source],
        no_reuse_reason=event.no_reuse,
        seed=event.seed,
        index=index,
    )


def from_progress(event: Progress, index: int) -> generation_pb2.Progress:
    """Part of a prompt was read."""
    return generation_pb2.Progress(
        index=index,
        total_tokens=event.total,
        cached_tokens=event.cached,
        processed_tokens=event.processed,
        elapsed=to_duration(event.elapsed_s),
    )


def from_chunk(
    event: Chunk, index: int, deltas: Iterable[generation_pb2.ChatDelta] = ()
) -> generation_pb2.Chunk:
    """A token was sampled."""
    return generation_pb2.Chunk(
        index=index,
        text=event.text,
        token_id=event.token_id,
        logprobs=None if event.logprobs is None else _logprobs(event.logprobs),
        mid_character=event.mid_character,
        completes_stop=event.completes_stop,
        completion_tokens=event.completion_tokens,
        decode_elapsed=to_duration(event.decode_s),
        chat_deltas=deltas,
    )


def from_finished(
    event: Finished, index: int, deltas: Iterable[generation_pb2.ChatDelta] = ()
) -> generation_pb2.Finished:
    """A sample is complete; what matched is a text or a token, the text first."""
    message = generation_pb2.Finished(
        index=index,
        finish_reason=_REASONS[event.reason],
        completion_tokens=event.completion_tokens,
        queue_duration=to_duration(event.queue_s),
        prefill_duration=to_duration(event.prefill_s),
        decode_duration=to_duration(event.decode_s),
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        held_tokens=event.held_tokens,
        truncated=event.truncated,
        has_new_line=event.has_new_line,
        unsent_text=event.unsent_text,
        indent_cut_chars=event.indent_cut_chars,
        chat_deltas=deltas,
    )
    if event.stop_string is not None:
        message.stop_string = event.stop_string
    elif event.stop_token_id is not None:
        message.stop_token_id = event.stop_token_id
    return message


def from_adapters(adapters: Iterable[AdapterScale]) -> common_pb2.AdapterScales:
    """A set as it is shown: zero scales are left out."""
    return common_pb2.AdapterScales(
        scales=[
            common_pb2.AdapterScale(adapter_id=entry.adapter_id, scale=entry.scale)
            for entry in adapters
            if entry.scale != 0
        ]
    )


def from_sampling(params: SamplingParams) -> generation_pb2.SamplingParams:
    """All parameters, every field present but a seed that is drawn per request."""
    message = generation_pb2.SamplingParams(
        seed=params.seed,
        dry_sequence_breakers=common_pb2.StringList(values=params.dry_sequence_breakers),
        mirostat=_MIROSTAT[params.mirostat],
        logit_bias=dict(params.logit_bias),
        samplers=generation_pb2.SamplerChain(
            samplers=[_SAMPLERS[sampler] for sampler in params.samplers]
        ),
    )
    for name in _NUMBERS:
        setattr(message, name, getattr(params, name))
    return message


def from_settings(request: Request) -> generation_pb2.GenerationSettings:
    """What a request runs, or ran, under."""
    time_limit_s = request.time_limit_s
    return generation_pb2.GenerationSettings(
        sampling=from_sampling(request.sampling),
        max_tokens=request.max_tokens,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        cache_prompt=request.cache_prompt,
        n_keep=request.n_keep,
        n_discard=request.n_discard,
        n_cache_reuse=request.n_cache_reuse,
        n_indent=request.n_indent,
        time_limit=None if time_limit_s is None else to_duration(time_limit_s),
        top_logprobs=request.top_logprobs,
        post_sampling_probs=request.post_sampling_probs,
        preserved_tokens=sorted(request.preserved_tokens),
        render_special=request.render_special,
        adapters=from_adapters(request.adapters or ()),
        return_progress=request.progress,
        constrained=request.constraint is not None,
        grammar_lazy=request.constraint is not None and request.constraint.is_lazy,
    )


def from_defaults(defaults: GenerationDefaults) -> generation_pb2.GenerationSettings:
    """What a request that says nothing would run under."""
    (request,) = to_requests(
        generation_pb2.GenerateRequest(),
        request_id="",
        prompt=(),
        defaults=defaults,
        deadline_s=None,
        tenant="",
    )
    settings = from_settings(request)
    settings.constrained = bool(defaults.grammar)
    settings.grammar = defaults.grammar
    settings.reasoning.format = REASONING_FORMATS[defaults.reasoning.format]
    settings.reasoning.budget_tokens = defaults.reasoning.budget_tokens
    settings.reasoning.budget_message = defaults.reasoning.budget_message
    return settings


def from_source(source: CacheSource) -> generation_pb2.CacheSource.ValueType:
    """Where reused tokens came from."""
    return _SOURCES[source]


def from_saved(saved: SavedSlot, filename: str) -> slot_pb2.SaveSlotResponse:
    """A slot was saved."""
    return slot_pb2.SaveSlotResponse(
        slot_id=saved.slot_id,
        filename=filename,
        saved_tokens=saved.tokens,
        size_bytes=saved.size_bytes,
        elapsed=to_duration(saved.elapsed_s),
    )


def from_restored(restored: RestoredSlot, filename: str) -> slot_pb2.RestoreSlotResponse:
    """A slot was restored."""
    return slot_pb2.RestoreSlotResponse(
        slot_id=restored.slot_id,
        filename=filename,
        restored_tokens=restored.tokens,
        size_bytes=restored.size_bytes,
        elapsed=to_duration(restored.elapsed_s),
        adapters=from_adapters(restored.adapters),
    )


def from_slot(slot: SlotInfo) -> slot_pb2.Slot:
    """A slot as lists show it."""
    request = slot.request
    return slot_pb2.Slot(
        id=slot.slot_id,
        state=_SLOT_STATES[slot.state],
        context_tokens=slot.context_tokens,
        cached_tokens=slot.cached_tokens,
        request_id=request.request_id if request else "",
        held_tokens=slot.held_tokens,
        num_pages=slot.pages,
        evaluated_tokens=slot.evaluated_tokens,
        decoded_tokens=slot.decoded_tokens,
        remaining_tokens=slot.remaining_tokens if slot.remaining_tokens >= 0 else None,
        has_new_line=slot.has_new_line,
        task_id=slot.task_id if request else None,
        settings=_without_texts(from_settings(request)) if request else None,
        annotation=request.annotation if request else "",
    )


def _without_texts(
    settings: generation_pb2.GenerationSettings,
) -> generation_pb2.GenerationSettings:
    """A list is for everybody; what a request says is for its client alone."""
    settings.ClearField("stop")
    settings.ClearField("preserved_tokens")
    settings.sampling.ClearField("dry_sequence_breakers")
    settings.sampling.ClearField("logit_bias")
    return settings


def from_pool(pool: PoolInfo) -> rebuild_pb2.Pool:
    """A pool as it stands."""
    return rebuild_pb2.Pool(
        kind=_POOLS[pool.kind],
        size=pool.size,
        used=pool.used,
        floor=pool.floor,
        ceiling=pool.ceiling,
        unit_bytes=pool.unit_bytes,
        unit_tokens=pool.unit_tokens,
        free=pool.free,
        pinned=pool.pinned,
        cached=pool.cached,
    )


def from_counters(counters: Counters) -> model_pb2.Counters:
    """All totals."""
    return model_pb2.Counters(
        requests_started=counters.requests_started,
        requests_finished=counters.requests_finished,
        requests_failed=counters.requests_failed,
        requests_cancelled=counters.requests_cancelled,
        requests_refused=counters.requests_refused,
        prompt_tokens_evaluated=counters.prompt_tokens_evaluated,
        prompt_tokens_cached=counters.prompt_tokens_cached,
        generated_tokens=counters.generated_tokens,
        prefill_duration=to_duration(counters.prefill_s),
        decode_duration=to_duration(counters.decode_s),
        steps=counters.steps,
        busy_slot_steps=counters.busy_slot_steps,
        preemptions=counters.preemptions,
        evicted_slots=counters.evicted_slots,
        max_held_tokens=counters.max_held_tokens,
        compiles=counters.compiles,
    )


def to_duration(seconds: float) -> Duration:
    """Returns a duration, rounded to nanoseconds."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _group(message: generation_pb2.GenerateRequest, tenant: str, request_id: str) -> str:
    """Who counts once in the queue: all calls of a group, or all samples of a call.

    No request's id has a space.
    """
    return f"{tenant} {message.group.id}" if message.HasField("group") else request_id


def _sample(first: Request, index: int) -> Request:
    if index == 0:
        return first
    seed = first.sampling.seed
    if seed is not None:
        seed = (seed + index) % 2**32
    return replace(
        first,
        request_id=f"{first.request_id}/{index}",
        sampling=replace(first.sampling, seed=seed),
    )


def _logprobs(logprobs: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    sampled = logprobs.sampled
    message = generation_pb2.TokenLogprobs(
        sampled=generation_pb2.TokenLogprob(
            token_id=sampled.token_id, piece=sampled.piece, logprob=sampled.logprob
        )
    )
    # Made inside the message: one of its own per token takes ten times the memory.
    add = message.top.add
    for entry in logprobs.top:
        add(token_id=entry.token_id, piece=entry.piece, logprob=entry.logprob)
    return message

"""Checks a request against the engine that is to run it. Pure; runs on the caller's thread.

The service reports every fault of a message at once; this is the engine's own door, so that
nothing that any caller builds can reach a step. Field names are those of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import (
    BatchOverflow,
    ContextOverflow,
    InvalidField,
    KvPagesExhausted,
    NoSuchAdapter,
    NoSuchSlot,
    NotSupported,
    TokenNotInVocab,
)
from engine.memory.planner import pages_for
from engine.requests import Pooling, Request, SamplingParams

MAX_INT32 = 2**31 - 1
MAX_UINT32 = 2**32 - 1
# The largest finite float32: samplers compute in float32, where a greater number is an infinity.
MAX_FLOAT32 = 3.4028234663852886e38
# 0.99 in float32, as a message brings it.
MAX_DECAY = 0.9900000095367432
# A wire id has at most 36 characters; several samples of one request add a suffix.
MAX_ID_CHARS = 64

# What encoders do not have, as a refusal names it.
GENERATION = "text generation"
ENCODER_ADAPTERS = "adapters of an encoder"
ENCODER_SLOTS = "slots of an encoder, which keeps nothing of a text"


@dataclass(frozen=True)
class RequestLimits:
    """The engine's sizes that bound a request.

    `is_encoder`: the model reads texts and generates nothing. `has_head`: it scores them.
    """

    num_slots: int
    vocab_size: int
    context_tokens: int
    kv_pages: int
    page_tokens: int
    adapter_ids: frozenset[int] = frozenset()
    chunk_tokens: int = MAX_INT32
    embeds: bool = False
    is_encoder: bool = False
    has_head: bool = False


def check_request(request: Request, limits: RequestLimits) -> None:
    """Checks every field of a request.

    Raises:
        InvalidField: a field is out of range or not finite; names field, value and limit.
        TokenNotInVocab: a token id is at or past the end of the vocabulary.
        ContextOverflow: the prompt leaves no room for one token in the slot's context.
        KvPagesExhausted: the prompt does not fit in the KV pool even alone.
        NoSuchSlot: the pinned slot does not exist.
        NoSuchAdapter: an adapter is not loaded.
        NotSupported: a vector is asked for, and the engine was not made for that; or a text, scores
            or adapters, which the model does not have.
        BatchOverflow: the input of a vector is longer than one chunk, and not all of its tokens
            may be evaluated without those behind them.
    """
    if not 1 <= len(request.request_id) <= MAX_ID_CHARS:
        length = len(request.request_id)
        raise InvalidField("request_id", f"must have 1 to {MAX_ID_CHARS} characters, has {length}")
    if request.slot_id is not None and not 0 <= request.slot_id < limits.num_slots:
        raise NoSuchSlot(request.slot_id, limits.num_slots)
    _check_adapters(request, limits)
    # What no context holds is refused for its length, not looked at.
    _check_vocab(request.prompt[: limits.context_tokens], limits.vocab_size)
    _check_vocab(request.preserved_tokens, limits.vocab_size)
    _check_vocab((token_id for token_id, _ in request.sampling.logit_bias), limits.vocab_size)
    _check_budget(request)
    _check_sampling(request.sampling)
    _check_fit(request, limits)


def _check_adapters(request: Request, limits: RequestLimits) -> None:
    """Looked up again at admission: an adapter may be unloaded while the request waits."""
    if request.adapters and limits.is_encoder:
        raise NotSupported(ENCODER_ADAPTERS)
    seen: set[int] = set()
    for index, entry in enumerate(request.adapters or ()):
        if entry.adapter_id not in limits.adapter_ids:
            raise NoSuchAdapter(entry.adapter_id)
        if entry.adapter_id in seen:
            field = f"adapters.scales[{index}].adapter_id"
            raise InvalidField(field, f"{entry.adapter_id} is named twice")
        seen.add(entry.adapter_id)
        _check_float(f"adapters.scales[{index}].scale", entry.scale)


def _check_vocab(token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise TokenNotInVocab(token_id, vocab_size)


def _check_fit(request: Request, limits: RequestLimits) -> None:
    num_tokens = len(request.prompt)
    if request.pooling is not None:
        _check_embedding(request, request.pooling, limits)
    elif limits.is_encoder:
        raise NotSupported(GENERATION)
    elif num_tokens >= limits.context_tokens:
        raise ContextOverflow(num_tokens, limits.context_tokens)
    needed = pages_for(num_tokens, limits.page_tokens)
    if needed > limits.kv_pages:
        raise KvPagesExhausted(needed, limits.kv_pages)


def _check_embedding(request: Request, pooling: Pooling, limits: RequestLimits) -> None:
    num_tokens = len(request.prompt)
    if not limits.embeds:
        raise NotSupported("embeddings: the server was not started for them")
    if not num_tokens:
        raise InvalidField("prompt", "an input of no tokens has no vector")
    if pooling is Pooling.RANK and not limits.has_head:
        raise NotSupported("RANK pooling: the model has no classification head")
    # What llama.cpp pools in one piece is refused where it would take two.
    goes_on = pooling in (Pooling.LAST, Pooling.RANK) and not limits.is_encoder
    if not goes_on and num_tokens > limits.chunk_tokens:
        raise BatchOverflow(num_tokens, limits.chunk_tokens)
    if num_tokens > limits.context_tokens:
        raise ContextOverflow(num_tokens, limits.context_tokens)


def _check_budget(request: Request) -> None:
    if request.max_tokens is not None:
        _check_int("max_tokens", request.max_tokens, 0, MAX_INT32)
    if request.top_logprobs is not None:
        _check_int("top_logprobs", request.top_logprobs, 0, MAX_INT32)
    _check_int("n_keep", request.n_keep, -1, MAX_INT32)
    _check_int("n_discard", request.n_discard, 0, MAX_INT32)
    _check_int("n_cache_reuse", request.n_cache_reuse, 0, MAX_INT32)
    _check_int("n_indent", request.n_indent, 0, MAX_INT32)
    if request.time_limit_s is not None:
        _check_float("time_limit", request.time_limit_s, low=0.0, excludes_low=True)
    if request.deadline_s is not None:
        _check_float("deadline_s", request.deadline_s)


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.seed is not None:
        _check_int("sampling.seed", sampling.seed, 0, MAX_UINT32)
    _check_truncation(sampling)
    _check_penalties(sampling)
    _check_float("sampling.mirostat_tau", sampling.mirostat_tau)
    _check_float("sampling.mirostat_eta", sampling.mirostat_eta)
    _check_float("sampling.adaptive_target", sampling.adaptive_target, high=1.0)
    _check_float("sampling.adaptive_decay", sampling.adaptive_decay, low=0.0, high=MAX_DECAY)
    for token_id, bias in sampling.logit_bias:
        # Minus infinity forbids a token; every other bias is a number.
        if bias != -math.inf:
            _check_float(f"sampling.logit_bias[{token_id}]", bias)


def _check_truncation(sampling: SamplingParams) -> None:
    _check_float("sampling.temperature", sampling.temperature, low=0.0)
    _check_float("sampling.dynatemp_range", sampling.dynatemp_range)
    _check_float("sampling.dynatemp_exponent", sampling.dynatemp_exponent)
    _check_int("sampling.top_k", sampling.top_k, 0, MAX_INT32)
    _check_float("sampling.top_p", sampling.top_p, low=0.0, high=1.0)
    _check_float("sampling.min_p", sampling.min_p, low=0.0, high=1.0)
    _check_float("sampling.typical_p", sampling.typical_p)
    _check_float("sampling.top_n_sigma", sampling.top_n_sigma)
    _check_float("sampling.xtc_probability", sampling.xtc_probability, low=0.0, high=1.0)
    _check_float("sampling.xtc_threshold", sampling.xtc_threshold, low=0.0, high=1.0)
    _check_int("sampling.min_keep", sampling.min_keep, 0, MAX_INT32)


def _check_penalties(sampling: SamplingParams) -> None:
    _check_int("sampling.repeat_last_n", sampling.repeat_last_n, 0, MAX_INT32)
    repeat = sampling.repeat_penalty
    _check_float("sampling.repeat_penalty", repeat, low=0.0, excludes_low=True)
    _check_float("sampling.frequency_penalty", sampling.frequency_penalty)
    _check_float("sampling.presence_penalty", sampling.presence_penalty)
    _check_float("sampling.dry_multiplier", sampling.dry_multiplier)
    _check_float("sampling.dry_base", sampling.dry_base)
    _check_int("sampling.dry_allowed_length", sampling.dry_allowed_length, 0, MAX_INT32)
    _check_int("sampling.dry_penalty_last_n", sampling.dry_penalty_last_n, 0, MAX_INT32)


def _check_int(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidField(field, f"must be in [{low}, {high}], got {value}")


def _check_float(
    field: str,
    value: float,
    *,
    low: float = -MAX_FLOAT32,
    high: float = MAX_FLOAT32,
    excludes_low: bool = False,
) -> None:
    if not math.isfinite(value):
        raise InvalidField(field, f"must be a finite number, got {value}")
    if value < low or value > high or (excludes_low and value == low):
        opening = "(" if excludes_low else "["
        raise InvalidField(field, f"must be in {opening}{low:g}, {high:g}], got {value:g}")

"""The `generation_settings` object, as the peer echoes the parameters of a request.

The short form is that of `/slots` and `/props`. Key order is the peer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.fields import Trigger
from gateway.peer_json import Json
from gateway.schema import CompletionParams

_LONG_ONLY = frozenset(
    {
        "dry_sequence_breakers",
        "stop",
        "logit_bias",
        "grammar",
        "grammar_lazy",
        "grammar_triggers",
        "preserved_tokens",
    }
)


def long_settings(
    params: CompletionParams,
    *,
    bias: Sequence[tuple[int, float]],
    preserved: Sequence[int],
) -> dict[str, Json]:
    """All settings. `bias` and `preserved` are the request's texts turned into token ids."""
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "typical_p": params.typical_p,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "dry_sequence_breakers": params.dry_sequence_breakers,
        "mirostat": params.mirostat,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "adaptive_target": params.adaptive_target,
        "adaptive_decay": params.adaptive_decay,
        "stop": params.stop,
        "max_tokens": params.n_predict,
        "n_predict": params.n_predict,
        "n_keep": params.n_keep,
        "n_discard": params.n_discard,
        "ignore_eos": params.ignore_eos,
        "stream": params.stream,
        "logit_bias": [_bias(token, value) for token, value in bias],
        "n_probs": params.n_probs,
        "min_keep": params.min_keep,
        "grammar": params.grammar,
        "grammar_lazy": params.grammar_lazy,
        "grammar_triggers": [_trigger(trigger) for trigger in params.grammar_triggers],
        "preserved_tokens": preserved,
        "chat_format": params.chat_format,
        "reasoning_format": params.reasoning_format,
        "reasoning_in_content": params.is_reasoning_in_content,
        "generation_prompt": params.generation_prompt,
        "samplers": params.samplers,
        "speculative.types": "none",
        "timings_per_token": params.timings_per_token,
        "post_sampling_probs": params.post_sampling_probs,
        "backend_sampling": params.backend_sampling,
        "lora": [{"id": adapter, "scale": scale} for adapter, scale in params.lora],
    }


def short_settings(params: CompletionParams) -> dict[str, Json]:
    """What `/slots` and `/props` show: without texts and lists that may grow long."""
    settings = long_settings(params, bias=(), preserved=())
    return {key: value for key, value in settings.items() if key not in _LONG_ONLY}


def _bias(token: int, value: float) -> dict[str, Json]:
    return {"bias": value if math.isfinite(value) else None, "token": token}


def _trigger(trigger: Trigger) -> dict[str, Json]:
    shown: dict[str, Json] = {"type": trigger.kind, "value": trigger.value}
    return shown if trigger.token is None else shown | {"token": trigger.token}

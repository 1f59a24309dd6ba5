"""Which sampling parameters a chain can be built from. The last guard: callers check ranges first.

The bounds are those that keep the arithmetic of the samplers defined and their memory small, plus
llama.cpp's own refusals.
"""

from __future__ import annotations

import math

from engine.errors import InvalidField, TokenNotInVocab
from engine.requests import SamplingParams
from engine.sampling.float32 import MAX

_INT32_MAX = 2**31 - 1
# Each breaker is searched for in the whole vocabulary.
MAX_BREAKERS = 256
# Each byte may begin a rest that a step has to tokenize.
MAX_BREAKER_BYTES_IN_ALL = 512
# 0.99 in float32, as a message brings it.
MAX_ADAPTIVE_DECAY = 0.9900000095367432

_FLOATS = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
)
_COUNTS = (
    "repeat_last_n",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "min_keep",
)


def check_params(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuses parameters that no chain can be built from.

    Raises:
        InvalidField: A number is not finite in float32 or out of its range; names the field.
        TokenNotInVocab: A biased token does not exist.
    """
    for name in _FLOATS:
        value: float = getattr(params, name)
        if not abs(value) <= MAX:
            raise InvalidField(f"sampling.{name}", f"{value} is not a finite 32-bit float")
    for name in _COUNTS:
        _check_count(name, getattr(params, name))
    if not -_INT32_MAX <= params.top_k <= _INT32_MAX:
        raise InvalidField("sampling.top_k", f"{params.top_k} is not a 32-bit integer")
    # The reciprocal must be finite too, hence not merely "greater than 0".
    if not params.repeat_penalty * MAX >= 1.0:
        raise InvalidField(
            "sampling.repeat_penalty", f"{params.repeat_penalty} must be greater than 0"
        )
    if not 0 <= params.adaptive_decay <= MAX_ADAPTIVE_DECAY:
        raise InvalidField(
            "sampling.adaptive_decay",
            f"{params.adaptive_decay} is not in 0 .. {MAX_ADAPTIVE_DECAY}",
        )
    if len(params.dry_sequence_breakers) > MAX_BREAKERS:
        raise InvalidField(
            "sampling.dry_sequence_breakers",
            f"{len(params.dry_sequence_breakers)} breakers, at most {MAX_BREAKERS} are allowed",
        )
    size = sum(
        len(breaker.encode("utf-8", "surrogatepass")) for breaker in params.dry_sequence_breakers
    )
    if size > MAX_BREAKER_BYTES_IN_ALL:
        raise InvalidField(
            "sampling.dry_sequence_breakers",
            f"{size} bytes in all, at most {MAX_BREAKER_BYTES_IN_ALL} are allowed",
        )
    _check_bias(params.logit_bias, vocab_size)


def _check_count(name: str, value: int) -> None:
    if not 0 <= value <= _INT32_MAX:
        raise InvalidField(f"sampling.{name}", f"{value} is not in 0 .. {_INT32_MAX}")


def _check_bias(pairs: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    for token_id, bias in pairs:
        if not 0 <= token_id < vocab_size:
            raise TokenNotInVocab(token_id, vocab_size)
        if not (bias <= MAX and (bias >= -MAX or bias == -math.inf)):
            raise InvalidField(
                "sampling.logit_bias",
                f"{bias} for token {token_id} is neither a finite 32-bit float nor -inf",
            )

"""Range checks of how logits become a token; see `service.validate`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvarts.v1 import generation_pb2

from service.faults import Faults

MAX_INT32 = 2**31 - 1
MAX_BREAKERS = 256
MAX_BREAKER_BYTES = 40
MAX_BREAKER_BYTES_IN_ALL = 512
MAX_SAMPLERS = 64

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


def check_sampling(
    faults: Faults, sampling: generation_pb2.SamplingParams, vocab_size: int
) -> None:
    """Records every field that is out of the range that its comment in the contract names."""
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
    _check_bias(faults, sampling, vocab_size)


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
    total = sum(len(breaker.encode()) for breaker in breakers)
    faults.size(field, total, MAX_BREAKER_BYTES_IN_ALL, "bytes in all")
    for i, breaker in enumerate(breakers[:MAX_BREAKERS]):
        size = len(breaker.encode())
        if not 1 <= size <= MAX_BREAKER_BYTES:
            faults.add(f"{field}[{i}]", f"{size} bytes is not between 1 and {MAX_BREAKER_BYTES}")


def _check_bias(faults: Faults, sampling: generation_pb2.SamplingParams, vocab_size: int) -> None:
    bias = sampling.logit_bias
    if len(bias) > vocab_size:
        faults.size("sampling.logit_bias", len(bias), vocab_size, "entries")
        return
    for token_id, value in bias.items():
        if math.isnan(value) or value == math.inf:
            faults.add(f"sampling.logit_bias[{token_id}]", f"{value} is neither finite nor -inf")

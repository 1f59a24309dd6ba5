"""The `timings` object of an answer, computed as the peer computes it."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from gateway.peer_json import Json


@dataclass(frozen=True)
class Timings:
    """Token counts and times of one sample; times in whole microseconds.

    The first token comes with the prompt, so rates of generation count one token less.
    """

    cached: int
    evaluated: int
    prompt_us: int
    predicted: int
    predict_us: int

    def to_json(self) -> dict[str, Json]:
        """The nine members, never null; a rate without a divisor is 0."""
        prompt_ms = self.prompt_us / 1000.0
        predict_us = max(1, self.predict_us) if self.predicted else 0
        predict_ms = predict_us / 1000.0
        steps = max(0, self.predicted - 1)
        return {
            "cache_n": self.cached,
            "prompt_n": self.evaluated,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": _divide(prompt_ms, self.evaluated),
            "prompt_per_second": _divide(1e3, prompt_ms) * self.evaluated,
            "predicted_n": self.predicted,
            "predicted_ms": predict_ms,
            "predicted_per_token_ms": _divide(predict_ms, steps),
            "predicted_per_second": _divide(1e3, predict_ms) * steps,
        }


def microseconds(duration: Duration) -> int:
    """A duration in whole microseconds."""
    return duration.seconds * 1_000_000 + duration.nanos // 1000


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0

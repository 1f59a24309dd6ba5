"""Requests that measure: decode with several streams at once, and a long prompt."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.bench.server import Server

_DECODE_TOKENS = 64
_PREFILL_TOKENS = 512


def decode_rate(server: Server, streams: int) -> float:
    """Generated tokens per second over all streams together, prompt time included."""
    bodies = [_body(prompt=[1, 2 + i], tokens=_DECODE_TOKENS) for i in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        started_s = time.monotonic()
        replies = list(pool.map(server.complete, bodies))
        took_s = time.monotonic() - started_s
    return sum(reply["tokens_predicted"] for reply in replies) / took_s


def prefill_rate(server: Server) -> float:
    """Prompt tokens per second of one long prompt that no slot holds."""
    prompt = [random.randrange(100, 400) for _ in range(_PREFILL_TOKENS)]
    timings = server.complete(_body(prompt=prompt, tokens=1))["timings"]
    return timings["prompt_per_second"]


def _body(*, prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }

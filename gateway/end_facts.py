"""What the end of an answer needs from the service, asked for while the answer begins.

A service that stops lets running answers end but takes no new call: whatever is asked only at the
end spoils an answer that is complete. This module knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvarts.v1 import tokenization_pb2

from gateway.prompts import Prompt, tokenize
from gateway.requests import Job
from gateway.service import Metadata, Service, answer

K = TypeVar("K")
V = TypeVar("V")
# Calls that one body keeps in flight for this, beside those that generate.
_MAX_CALLS = 8


@dataclass(frozen=True)
class EndFacts:
    """The texts of prompts by their tokens, and how many tokens each stop text has."""

    prompt_texts: Mapping[tuple[int, ...], str]
    stop_lengths: Mapping[str, int]


async def ask(
    service: Service, jobs: Sequence[Job], metadata: Metadata, *, needs_prompt_text: bool
) -> EndFacts:
    """Asks for what the answers of these jobs, all of one body, can show.

    Raises:
        ApiError: the service refused a call or is gone.
    """
    gate = asyncio.Semaphore(_MAX_CALLS)
    # A prompt with several samples is asked for once.
    prompts = dict.fromkeys(job.prompt for job in jobs if needs_prompt_text)
    stops = dict.fromkeys(stop for job in jobs for stop in _counted_stops(job))

    async def prompt_text(prompt: tuple[int, ...]) -> str:
        request = tokenization_pb2.DetokenizeRequest(token_ids=prompt, as_prompt=True)
        call = service.tokenization.Detokenize(request, metadata=metadata)
        return (await answer(call)).text

    async def stop_length(stop: str) -> int:
        prompt = Prompt((stop,))
        tokens = await tokenize(service, prompt, metadata, add_special=False, parse_special=False)
        return len(tokens)

    texts, lengths = await asyncio.gather(
        _each(prompts, prompt_text, gate), _each(stops, stop_length, gate)
    )
    return EndFacts(texts, lengths)


def _counted_stops(job: Job) -> Sequence[str]:
    """The stop texts whose entries an answer in one piece drops; a stream has sent them."""
    params = job.params
    return params.stop if params.n_probs > 0 and not params.stream else ()


async def _each(
    keys: Iterable[K], ask_one: Callable[[K], Awaitable[V]], gate: asyncio.Semaphore
) -> dict[K, V]:
    async def bounded(key: K) -> V:
        async with gate:
            return await ask_one(key)

    asked = list(keys)
    return dict(zip(asked, await asyncio.gather(*map(bounded, asked)), strict=True))

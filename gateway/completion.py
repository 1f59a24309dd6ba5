"""The course of every completion request, whatever its dialect.

Body -> prompts and parameters -> one call per prompt and sample -> a stream of events or one
answer. A client that leaves ends the work at once, also while it is queued: nothing is sent
before a slot has started, so the first error of a stream is a plain HTTP error. Nothing is asked
of the service once the last event is there, since a service that stops answers no more.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvarts.v1 import common_pb2, generation_pb2
from starlette.responses import Response

from gateway import probabilities
from gateway.backend import Backend
from gateway.connection import Connection, json_response
from gateway.dialect import Dialect, Outcome, Step
from gateway.errors import ApiError, FieldError, invalid
from gateway.facts import Facts
from gateway.off_loop import off_loop
from gateway.peer_json import Json
from gateway.prompts import Prompt, check_vocabulary, read_prompts, tokenize_all
from gateway.reply import with_ids
from gateway.requests import Job, check_params, make_jobs, resolve
from gateway.rpc_errors import context_overflow
from gateway.run import Event, Run, Sample, timings_of
from gateway.schema import CompletionParams, read_params
from gateway.sse import EventStream

T = TypeVar("T")

# What a listed token comes to in an answer, roughly.
_PROBABILITY_BYTES = 64


@dataclass(frozen=True)
class _Work:
    """The jobs of one body, and how their answers look."""

    backend: Backend
    jobs: Sequence[Job]
    dialect: Dialect
    params: CompletionParams
    body_bytes: int

    def run(self) -> Run:
        """The calls that generate."""
        backend = self.backend
        num_slots = backend.facts.info.num_slots
        return Run(backend.service, self.jobs, backend.metadata, num_slots, weight=self.body_bytes)

    @property
    def headers(self) -> Mapping[str, str]:
        """What the answer says beside its body."""
        return self.jobs[0].resolved.adapters.headers if self.jobs else {}

    @property
    def weight(self) -> int:
        """How much one answer may have to show: of the body, and of the vocabulary."""
        return self.body_bytes + self.token_weight

    @property
    def token_weight(self) -> int:
        """The same of one token's event, which shows nothing of the body."""
        vocab_size = self.backend.facts.model.vocab_size
        return _PROBABILITY_BYTES * min(self.params.n_probs, vocab_size)


async def complete(
    connection: Connection,
    backend: Backend,
    body: Mapping[str, Any],
    dialect: Dialect,
    chat: common_pb2.ChatPrompt | None = None,
) -> Response | EventStream:
    """Serves a completion body that already has a `prompt`.

    Args:
        connection: The client.
        backend: Where the request goes.
        body: The completion's fields.
        dialect: What answers look like.
        chat: The conversation that the prompt is, where the answer is a message.

    Raises:
        ApiError: the body is refused, or the first thing that happens is an error.
    """
    size = connection.body_bytes
    prompts, params = await off_loop(lambda: read_body(body, backend.facts), weight=size)
    work = _prepare(backend, body, prompts, params, size, chat, dialect)
    # One watch over all of it: each costs a task.
    return await connection.while_connected(_answer(work))


async def _answer(preparing: Awaitable[_Work]) -> Response | EventStream:
    work = await preparing
    if not work.params.stream:
        response = await _whole(work)
        response.headers.update(work.headers)
        return response
    frames = _frames(work)
    try:
        # The headers' turn: a frame without bytes, or an error that is not in-band yet.
        await anext(frames)
    except BaseException:
        await frames.aclose()
        raise
    return EventStream(frames, work.params.sse_ping_interval, work.headers)


def read_body(body: Mapping[str, Any], facts: Facts) -> tuple[list[Prompt], CompletionParams]:
    """Reads and checks everything that needs no call.

    Raises:
        ApiError: the prompt or a field is refused.
    """
    if "prompt" not in body:
        raise invalid("key 'prompt' not found")
    prompts = read_prompts(body["prompt"])
    try:
        params = read_params(body, facts.defaults, facts.limits)
    except FieldError as error:
        raise invalid(str(error)) from error
    check_vocabulary(prompts, facts.model.vocab_size)
    check_params(params)
    return prompts, params


async def _prepare(
    backend: Backend,
    body: Mapping[str, Any],
    prompts: Sequence[Prompt],
    params: CompletionParams,
    body_bytes: int,
    chat: common_pb2.ChatPrompt | None,
    dialect: Dialect,
) -> _Work:
    facts = backend.facts
    resolved = await resolve(backend, params)
    tokens = await tokenize_all(backend, prompts)
    _check_all_fit(tokens, facts)
    shows_prompt = dialect.needs_prompt_text
    jobs = await off_loop(
        lambda: make_jobs(facts, body, resolved, tokens, chat, shows_prompt=shows_prompt),
        weight=body_bytes,
    )
    return _Work(backend, jobs, dialect, params, body_bytes)


def _check_all_fit(prompts: Sequence[tuple[int, ...]], facts: Facts) -> None:
    """Refuses a body of several prompts before any of them has begun.

    The service would refuse that prompt alone, and whether the others began would be a race.

    Raises:
        ApiError: a prompt is as long as the context of a slot.
    """
    context = facts.info.slot_context_tokens
    if len(prompts) == 1 or not facts.info.features.generation:
        return
    for prompt in prompts:
        if len(prompt) >= context:
            raise context_overflow(len(prompt), context)


async def _whole(work: _Work) -> Response:
    async with work.run() as run:
        samples = await run.collect()
    num_chunks = sum(len(sample.chunks) for sample in samples)

    def answer() -> Response:
        return json_response(work.dialect.whole([_outcome(sample) for sample in samples]))

    return await off_loop(answer, weight=work.weight * max(1, num_chunks))


async def _frames(work: _Work) -> AsyncGenerator[bytes, None]:
    """Yields b"" once the headers may go, then the bytes of every event."""
    is_first = True
    async with work.run() as run, contextlib.aclosing(run.events()) as events:
        try:
            async for sample, event in events:
                write = partial(_written, work.dialect, sample, event, is_first=is_first)
                is_last = isinstance(event, generation_pb2.Finished)
                weight = work.weight if is_last else work.token_weight
                data = await off_loop(write, weight=weight)
                if is_first:
                    is_first = False
                    yield b""
                if data:
                    yield data
        except ApiError as error:
            if is_first:
                raise
            yield work.dialect.framing.failure(error.body.to_json())
            return
    if work.dialect.framing.terminator:
        yield work.dialect.framing.terminator


def _written(dialect: Dialect, sample: Sample, event: Event, *, is_first: bool) -> bytes:
    data = _events_of(dialect, sample, event, is_first=is_first)
    return b"".join(dialect.framing.frame(value) for value in data)


def _events_of(dialect: Dialect, sample: Sample, event: Event, *, is_first: bool) -> Sequence[Json]:
    params = sample.job.params
    match event:
        case generation_pb2.Started():
            # The peer marks the start of a prompt by a null: the first only sends the headers.
            is_marked = not (is_first or params.return_progress or sample.job.is_sibling)
            return [None] if is_marked else []
        case generation_pb2.Progress():
            timings = sample.timings_at(event) if params.timings_per_token else None
            return dialect.progress(sample, event, timings)
        case generation_pb2.Chunk():
            return [] if event.mid_character else dialect.step(_step(sample, event))
        case generation_pb2.Finished():
            return dialect.end(_end(sample, event))


def _step(sample: Sample, chunk: generation_pb2.Chunk) -> Step:
    params = sample.job.params
    # The peer shows the timings once it knows that a stop text has ended the sample.
    is_timed = params.timings_per_token or chunk.completes_stop
    timings = sample.timings_at(chunk) if is_timed else None
    entry: Json = None
    if chunk.logprobs.top:
        entry = probabilities.entry(chunk, is_post_sampling=params.post_sampling_probs)
    return Step(sample, chunk, timings, entry)


def _end(sample: Sample, finished: generation_pb2.Finished) -> Outcome:
    deltas = with_ids(finished.chat_deltas)
    # What was sent cannot be cut any more.
    text = finished.unsent_text
    text = text[: max(0, len(text) - finished.indent_cut_chars)]
    return Outcome(
        sample, finished, text, (), (), finished.prompt_text, deltas, timings_of(finished)
    )


def _outcome(sample: Sample) -> Outcome:
    finished = sample.finished
    assert finished is not None
    params = sample.job.params
    text = "".join(chunk.text for chunk in sample.chunks) + finished.unsent_text
    return Outcome(
        sample=sample,
        finished=finished,
        text=text[: len(text) - finished.indent_cut_chars],
        tokens=[chunk.token_id for chunk in sample.chunks] if params.return_tokens else (),
        probabilities=_entries(sample, finished),
        prompt_text=finished.prompt_text,
        deltas=with_ids(
            delta for event in (*sample.chunks, finished) for delta in event.chat_deltas
        ),
        timings=timings_of(finished),
    )


def _entries(sample: Sample, finished: generation_pb2.Finished) -> Sequence[Json]:
    """One entry per step that did not end inside a character, but for those of a stop text."""
    params = sample.job.params
    if params.n_probs <= 0:
        return ()
    entries = [
        probabilities.entry(chunk, is_post_sampling=params.post_sampling_probs)
        for chunk in sample.chunks
        if not chunk.mid_character
    ]
    return entries[: max(0, len(entries) - finished.stop_string_tokens)]

"""The course of every completion request, whatever its dialect.

Body -> prompts and parameters -> one call per prompt and sample -> a stream of events or one
answer. A client that leaves ends the work at once, also while it is queued: nothing is sent
before a slot has started, so the first error of a stream is a plain HTTP error.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarts.v1 import generation_pb2, tokenization_pb2
from starlette.responses import Response

from gateway import probabilities
from gateway.connection import Connection, json_response
from gateway.dialect import Dialect, Outcome, Step
from gateway.errors import ApiError, FieldError, invalid
from gateway.facts import Facts
from gateway.peer_json import Json
from gateway.prompts import Prompt, check_vocabulary, read_prompts, tokenize, tokenize_all
from gateway.requests import Job, check_params, make_jobs, resolve
from gateway.run import Event, Run, Sample, timings_of
from gateway.schema import CompletionParams, read_params
from gateway.service import Metadata, Service, answer
from gateway.sse import EventStream, frame


@dataclass(frozen=True)
class Backend:
    """Where requests go: the service, what is known of it, and this client's credentials."""

    service: Service
    facts: Facts
    metadata: Metadata


async def complete(
    connection: Connection, backend: Backend, body: Mapping[str, Any], dialect: Dialect
) -> Response | EventStream:
    """Serves a completion body that already has a `prompt`.

    Raises:
        ApiError: the body is refused, or the first thing that happens is an error.
    """
    prompts, params = read_body(body, backend.facts)
    jobs = await connection.while_connected(_prepare(backend, body, prompts, params))
    run = Run(backend.service, jobs, backend.metadata, backend.facts.info.num_slots)
    if not params.stream:
        return await connection.while_connected(_whole(backend, run, dialect))
    frames = _frames(backend, run, dialect, params)
    try:
        # The headers' turn: a frame without bytes, or an error that is not in-band yet.
        await connection.while_connected(anext(frames))
    except BaseException:
        await frames.aclose()
        raise
    return EventStream(frames, params.sse_ping_interval, connection.stall_s)


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
) -> list[Job]:
    service, facts, metadata = backend.service, backend.facts, backend.metadata
    resolved = await resolve(service, facts, params, metadata)
    tokens = await tokenize_all(service, prompts, metadata)
    return make_jobs(facts, body, resolved, tokens)


async def _whole(backend: Backend, run: Run, dialect: Dialect) -> Response:
    async with run:
        samples = await run.collect()
    outcomes = [await _outcome(backend, sample, dialect) for sample in samples]
    return json_response(dialect.whole(outcomes))


async def _frames(
    backend: Backend, run: Run, dialect: Dialect, params: CompletionParams
) -> AsyncGenerator[bytes, None]:
    """Yields b"" once the headers may go, then the bytes of every event."""
    headers_sent = False
    async with run, contextlib.aclosing(run.events()) as events:
        try:
            async for sample, event in events:
                data = await _events_of(backend, dialect, sample, event, is_first=not headers_sent)
                if not headers_sent:
                    headers_sent = True
                    yield b""
                if data:
                    yield b"".join(frame(value) for value in data)
        except ApiError as error:
            if not headers_sent:
                raise
            yield frame({"error": error.body.to_json()})
            return
    if dialect.terminator:
        yield dialect.terminator


async def _events_of(
    backend: Backend, dialect: Dialect, sample: Sample, event: Event, *, is_first: bool
) -> Sequence[Json]:
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
            return dialect.end(await _end(backend, sample, event, dialect))


def _step(sample: Sample, chunk: generation_pb2.Chunk) -> Step:
    params = sample.job.params
    # The peer shows the timings once it knows that a stop text has ended the sample.
    is_timed = params.timings_per_token or chunk.completes_stop
    timings = sample.timings_at(chunk) if is_timed else None
    entry: Json = None
    if chunk.logprobs.top:
        entry = probabilities.entry(chunk, is_post_sampling=params.post_sampling_probs)
    return Step(sample, chunk, timings, entry)


async def _end(
    backend: Backend, sample: Sample, finished: generation_pb2.Finished, dialect: Dialect
) -> Outcome:
    prompt_text = await _prompt_text(backend, sample) if dialect.needs_prompt_text else ""
    return Outcome(sample, finished, "", (), (), prompt_text, timings_of(finished))


async def _outcome(backend: Backend, sample: Sample, dialect: Dialect) -> Outcome:
    finished = sample.finished
    assert finished is not None
    params = sample.job.params
    entries = await _entries(backend, sample, finished)
    return Outcome(
        sample=sample,
        finished=finished,
        text="".join(chunk.text for chunk in sample.chunks) + finished.unsent_text,
        tokens=[chunk.token_id for chunk in sample.chunks] if params.return_tokens else (),
        probabilities=entries,
        prompt_text=await _prompt_text(backend, sample) if dialect.needs_prompt_text else "",
        timings=timings_of(finished),
    )


async def _entries(
    backend: Backend, sample: Sample, finished: generation_pb2.Finished
) -> Sequence[Json]:
    """One entry per step that did not end inside a character, but for those of a stop text."""
    params = sample.job.params
    if params.n_probs <= 0:
        return ()
    entries = [
        probabilities.entry(chunk, is_post_sampling=params.post_sampling_probs)
        for chunk in sample.chunks
        if not chunk.mid_character
    ]
    if finished.finish_reason == generation_pb2.FINISH_REASON_STOP:
        stop = Prompt((finished.stop_string,))
        tokens = await tokenize(
            backend.service, stop, backend.metadata, add_special=False, parse_special=False
        )
        return entries[: max(0, len(entries) - len(tokens))]
    return entries


async def _prompt_text(backend: Backend, sample: Sample) -> str:
    request = tokenization_pb2.DetokenizeRequest(token_ids=sample.job.prompt, render_special=True)
    call = backend.service.tokenization.Detokenize(request, metadata=backend.metadata)
    return (await answer(call)).text

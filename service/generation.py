"""GenerationService: one request in, a stream of events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import cast

import grpc
from kvarts.v1 import generation_pb2, generation_pb2_grpc

from engine.requests import Request
from engine.types import Chunk, Event, Finished, FinishReason, Progress, Started
from service import convert, telemetry
from service.bridge import Bridge
from service.call_groups import CallGroups, Place
from service.chat_output import ChatOutput, ChatReader, plan_output
from service.constraint import read_constraint
from service.deadline import CallDeadline
from service.idle_slots import IdleSlotLog
from service.loaded import LoadedModel
from service.metrics import Metrics
from service.off_loop import off_loop, on_thread
from service.prompt import Prompt, read_prompt
from service.reasoning import read_budget
from service.validate import check_generate, check_group, check_vocabulary, limits_of

GenerateRequest = generation_pb2.GenerateRequest
GenerateResponse = generation_pb2.GenerateResponse

# Called the same in OpenTelemetry's conventions.
_TRACED_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
# OpenTelemetry's words where it has one.
_FINISH_REASONS = {reason: reason.value for reason in FinishReason} | {
    FinishReason.EOS: "stop",
    FinishReason.CONTEXT_FULL: "length",
}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Runs prompts on the engine."""

    def __init__(
        self,
        bridge: Bridge,
        metrics: Metrics,
        idle_slots: IdleSlotLog,
        groups: CallGroups,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bridge = bridge
        self._groups = groups
        self._idle_slots = idle_slots
        self._metrics = metrics
        self._clock = clock

    async def Generate(
        self,
        request: GenerateRequest,
        context: grpc.aio.ServicerContext[GenerateRequest, GenerateResponse],
    ) -> AsyncIterator[GenerateResponse]:
        """Streams what comes of one prompt.

        Raises:
            EngineError: The request was refused or failed.
        """
        record = telemetry.current()
        deadline = CallDeadline.of(context)
        arrived_s = self._clock()
        async with (
            self._bridge.admit(record.request_bytes) as model,
            self._place(request, model) as place,
        ):
            waited_s = self._clock() - arrived_s
            deadline_s = _deadline(context, model.engine.now_s())
            requests, prompt, output = await _read(request, model, deadline_s)
            prompt_text = ""
            observer = _Observer(record, self._metrics, self._clock, len(requests), waited_s)
            answer = _Answer(record.request_id, output)
            running = self._bridge.events(requests, deadline.cause, model=model, place=place)
            with prompt.counted():
                async with aclosing(running) as events:
                    async for sample, event in events:
                        if isinstance(event, Started):
                            self._idle_slots.started(event, model.engine.snapshot())
                        if observer.see(sample, event):
                            # A client may drop the call as soon as it has the last message.
                            record.code = "OK"
                        message = answer.message(sample, event)
                        if request.return_prompt_text and isinstance(event, Finished):
                            prompt_text = prompt_text or await _text_of(requests[0], model)
                            message.finished.prompt_text = prompt_text
                        if isinstance(event, Finished) and event.stop_string:
                            message.finished.stop_string_tokens = _length(event.stop_string, model)
                        yield message

    @asynccontextmanager
    async def _place(
        self, request: GenerateRequest, model: LoadedModel
    ) -> AsyncGenerator[Place | None]:
        """Keeps the call's place in its group, if it is of one."""
        if not request.HasField("group"):
            yield None
            return
        group = request.group
        check_group(group, limits_of(model))
        record = telemetry.current()
        with self._groups.place(
            model.engine,
            (record.tenant, group.id),
            num_calls=group.num_calls,
            index=group.index,
            size=record.request_bytes,
        ) as place:
            yield place


async def _read(
    request: GenerateRequest, model: LoadedModel, deadline_s: float | None
) -> tuple[Sequence[Request], Prompt, ChatOutput | None]:
    """Checks a request and makes what the engine runs, one per sample."""
    check_vocabulary(request.vocabulary, model)
    record = telemetry.current()
    await off_loop(lambda: check_generate(request, limits_of(model)), weight=record.weight)
    record.trace.operation = "chat" if request.HasField("chat") else "text_completion"
    record.trace.model = model.names.model_id
    record.trace.settings = _settings(request)
    prompt = await read_prompt(request, model)
    constraint = await read_constraint(request, model, prompt.chat)
    output: ChatOutput | None = None
    if prompt.chat is not None:
        chat = prompt.chat
        output = await on_thread(
            lambda: plan_output(request, chat, model), weight=record.request_bytes
        )
        constraint = output.constraint or constraint
    requests = convert.to_requests(
        request,
        request_id=record.request_id,
        prompt=prompt.tokens,
        defaults=model.defaults,
        deadline_s=deadline_s,
        tenant=record.tenant,
        constraint=constraint,
        reasoning=await read_budget(request, prompt.chat, constraint, model),
    )
    if output is not None:
        shown, stops = output.shown, output.stops
        requests = tuple(
            replace(one, preserved_tokens=one.preserved_tokens | shown, stop=(*one.stop, *stops))
            for one in requests
        )
    return requests, prompt, output


async def _text_of(request: Request, model: LoadedModel) -> str:
    """The prompt's text; on a thread, since a prompt may be as long as the context."""
    raw = await asyncio.to_thread(model.tokenizer.prompt_text, request.prompt)
    return raw.decode("utf-8", "replace")


def _length(stop: str, model: LoadedModel) -> int:
    return len(model.tokenizer.encode(stop, add_special=False, parse_special=False))


class _Answer:
    """Turns the events of one call into messages; `output` is None where the prompt is no chat."""

    def __init__(self, request_id: str, output: ChatOutput | None) -> None:
        self._request_id = request_id
        self._output = output
        self._readers: dict[int, ChatReader] = {}

    def message(self, sample: int, event: Event) -> GenerateResponse:
        match event:
            case Started():
                started = convert.from_started(event, self._request_id, sample)
                return GenerateResponse(started=started)
            case Progress():
                return GenerateResponse(progress=convert.from_progress(event, sample))
            case Chunk():
                deltas = self._deltas(sample, event.text)
                return GenerateResponse(chunk=convert.from_chunk(event, sample, deltas))
            case Finished():
                deltas = self._deltas(sample, event.unsent_text, is_last=True)
                return GenerateResponse(finished=convert.from_finished(event, sample, deltas))
            case _:
                raise AssertionError(f"{type(event).__name__} ends a stream with a status")

    def _deltas(
        self, sample: int, text: str, *, is_last: bool = False
    ) -> Sequence[generation_pb2.ChatDelta]:
        if self._output is None:
            return ()
        if sample not in self._readers:
            self._readers[sample] = self._output.begin()
        return self._readers[sample].push(text, is_last=is_last)


class _Observer:
    """Counts what one call's events tell of its waits, for its log line and the histograms.

    `waited_s` is how long it had waited for a model before.
    """

    def __init__(
        self,
        record: telemetry.RpcRecord,
        metrics: Metrics,
        clock: Callable[[], float],
        num_samples: int,
        waited_s: float,
    ) -> None:
        self._record = record
        self._metrics = metrics
        self._clock = clock
        self._waited_s = waited_s
        self._begun_s = clock() - waited_s
        record.trace.mark("queue")
        self._last_token_s: list[float | None] = [None] * num_samples
        self._num_left = num_samples

    def see(self, sample: int, event: Event) -> bool:
        """Takes note of an event; True if it is the last of the call."""
        record = self._record
        match event:
            case Started():
                record.trace.mark("prefill")
                record.slot_id = event.slot_id
                record.adapters = len(event.adapters)
                record.prompt_tokens = event.prompt_tokens
                record.cached_tokens = event.cached_tokens
            case Chunk():
                record.trace.mark("decode")
                record.output_tokens = (record.output_tokens or 0) + 1
                self._see_token(sample, event.decode_s)
            case Finished():
                queue_s = self._waited_s + event.queue_s
                record.queue_s = round(queue_s, 6)
                record.trace.finish_reasons.append(_FINISH_REASONS[event.reason])
                self._metrics.observe_queue(queue_s)
                self._num_left -= 1
            case _:
                pass
        return self._num_left == 0

    def _see_token(self, sample: int, decode_s: float) -> None:
        """The engine's own times: a client that reads slowly does not make tokens late."""
        last_s = self._last_token_s[sample]
        self._last_token_s[sample] = decode_s
        if last_s is not None:
            self._metrics.observe_inter_token(decode_s - last_s)
            return
        waited_s = self._clock() - self._begun_s
        self._metrics.observe_first_token(waited_s)
        if self._record.ttft_s is None:
            self._record.ttft_s = round(waited_s, 6)


def _settings(request: GenerateRequest) -> Mapping[str, int | float]:
    """What a request says of its sampling, under the names of OpenTelemetry's conventions."""
    sampling = request.sampling
    found: dict[str, int | float] = {
        name: getattr(sampling, name) for name in _TRACED_SETTINGS if sampling.HasField(name)
    }
    if request.HasField("max_tokens"):
        found["max_tokens"] = request.max_tokens
    return found


def _deadline(
    context: grpc.aio.ServicerContext[GenerateRequest, GenerateResponse], now_s: float
) -> float | None:
    """Returns the call's deadline on the engine's clock."""
    # The stub promises a float; a call without a deadline answers None.
    remaining_s = cast("float | None", context.time_remaining())
    return None if remaining_s is None else now_s + remaining_s

"""A service without a model: a byte tokenizer and scripted generations behind a real grpc.aio server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health as health_service
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from kvarts.v1 import (
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    lora_pb2,
    lora_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    rebuild_pb2,
    rebuild_pb2_grpc,
    slot_pb2,
    slot_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

from tests.unit.gateway.scripts import (
    BOS,
    CONTEXT_TOKENS,
    EOS,
    VOCAB_SIZE,
    Call,
    Response,
    Script,
    as_message,
    decode,
    echo_letters,
    encode,
    render,
)

WATCHED = "kvarts.v1.GenerationService"


def failing(
    code: grpc.StatusCode, reason: str, message: str, *, retry_s: int = 0, **metadata: str
) -> Refusal:
    """What a servicer raises to end a call with a status of ours."""
    status = status_pb2.Status(code=code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain="kvarts.v1", metadata=metadata)
    details: list[Any] = [info]
    if retry_s:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = retry_s
        details.append(retry)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return Refusal(status)


class Refusal(Exception):
    """Carries the status to the servicer's edge."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def _trace(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {name: str(value) for name, value in metadata if name.startswith("trace")}


def _key(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for name, value in metadata if name == "authorization"), "")


class FakeService(
    generation_pb2_grpc.GenerationServiceServicer,
    tokenization_pb2_grpc.TokenizationServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    slot_pb2_grpc.SlotServiceServicer,
    lora_pb2_grpc.LoraServiceServicer,
    embedding_pb2_grpc.EmbeddingServiceServicer,
    rebuild_pb2_grpc.RebuildServiceServicer,
):
    """All services in one object; tests change its attributes."""

    def __init__(self) -> None:
        self.script: Script = echo_letters
        self.calls: list[Call] = []
        self.slots: list[slot_pb2.Slot] = [
            slot_pb2.Slot(id=index, state=slot_pb2.SLOT_STATE_IDLE, context_tokens=CONTEXT_TOKENS)
            for index in range(2)
        ]
        self.erased: list[int] = []
        self.saved: list[slot_pb2.SaveSlotRequest] = []
        self.model = _model()
        self.info = _info()
        self.metrics = ""
        # The headers of traces that came with calls that generate.
        self.traces: list[dict[str, str]] = []
        self.embeds: list[embedding_pb2.EmbedRequest] = []
        self.pools = rebuild_pb2.GetPoolsResponse()
        self.rebuilds: list[rebuild_pb2.RebuildRequest] = []
        self.rebuilt = rebuild_pb2.RebuildResponse()
        # What LoadModel was asked and answers, and the models that a watcher is told of.
        self.loads: list[model_pb2.LoadModelRequest] = []
        self.loading: list[model_pb2.LoadModelResponse] = []
        # What watchers of the model are told, from the last one on; None knows no such call.
        self.tenures: list[model_pb2.WatchModelResponse] | None = None
        self._has_tenure = asyncio.Condition()
        self.adapters: list[lora_pb2.Adapter] = []
        self.scales: list[lora_pb2.SetAdapterScalesRequest] = []
        # The calls of TokenizationService as they come; a service that stops refuses them.
        self.text_calls = asyncio.Queue[str]()
        self.is_stopping = False
        # The calls of ModelService as they come; what they and a restore are refused with.
        self.model_calls = asyncio.Queue[str]()
        self.required_key: str | None = None
        self.refusals: dict[str, Refusal] = {}
        self._server = grpc.aio.server()
        # The health package has no types.
        self._health = cast(Any, health_service).aio.HealthServicer()

    async def start(self) -> str:
        """Serves on a free port; returns the address."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        tokenization_pb2_grpc.add_TokenizationServiceServicer_to_server(self, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        slot_pb2_grpc.add_SlotServiceServicer_to_server(self, self._server)
        lora_pb2_grpc.add_LoraServiceServicer_to_server(self, self._server)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(self, self._server)
        rebuild_pb2_grpc.add_RebuildServiceServicer_to_server(self, self._server)
        cast(Any, health_pb2_grpc).add_HealthServicer_to_server(self._health, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self.set_serving(True)
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stops at once."""
        await self._server.stop(None)

    async def set_serving(self, is_serving: bool) -> None:
        """Changes what health tells."""
        statuses = cast(Any, health_pb2).HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        await self._health.set(WATCHED, status)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Response]:
        call = Call(request, _key(context))
        self.calls.append(call)
        self.traces.append(_trace(context))
        is_done = False
        try:
            async for response in self.script(call):
                yield as_message(call.request, response)
            is_done = True
        except Refusal as refusal:
            is_done = True
            await context.abort_with_status(rpc_status.to_status(refusal.status))
        finally:
            if not is_done:
                call.was_cancelled.set()

    async def _take_text_call(self, name: str, context: Any) -> None:
        if self.is_stopping:
            refusal = failing(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "stops")
            await context.abort_with_status(rpc_status.to_status(refusal.status))
        self.text_calls.put_nowait(name)

    async def Tokenize(self, request: Any, context: Any) -> tokenization_pb2.TokenizeResponse:
        await self._take_text_call("Tokenize", context)
        tokens: list[int] = []
        parts = request.mixed.parts if request.HasField("mixed") else None
        if parts is None:
            tokens = encode(request.text)
            has_leading_text = True
        else:
            for part in parts:
                is_text = part.HasField("text")
                tokens += encode(part.text) if is_text else list(part.tokens.ids)
            has_leading_text = bool(parts) and parts[0].HasField("text")
        if request.add_special and has_leading_text:
            tokens.insert(0, BOS)
        if request.ids_only:
            return tokenization_pb2.TokenizeResponse(ids=tokens)
        return tokenization_pb2.TokenizeResponse(
            tokens=[tokenization_pb2.Token(id=t, piece=decode([t])) for t in tokens]
        )

    async def Detokenize(self, request: Any, context: Any) -> tokenization_pb2.DetokenizeResponse:
        await self._take_text_call("Detokenize", context)
        raw = decode(request.token_ids)
        return tokenization_pb2.DetokenizeResponse(text=raw.decode(errors="replace"), raw=raw)

    async def Embed(self, request: Any, context: Any) -> embedding_pb2.EmbedResponse:
        """Vectors of the token count and 0.5; a pair's score is the length of its document."""
        del context
        self.embeds.append(request)
        is_pooled = self.model.pooling != embedding_pb2.POOLING_NONE
        reply = embedding_pb2.EmbedResponse()
        for given in request.inputs:
            if given.HasField("pair"):
                size = len(given.pair.document)
                reply.embeddings.add(values=[size], dimension=1, num_rows=1, prompt_tokens=size)
                continue
            count = len(given.tokens.ids)
            rows = 1 if is_pooled else count
            reply.embeddings.add(
                values=[count, 0.5] * rows, dimension=2, num_rows=rows, prompt_tokens=count
            )
        return reply

    async def GetPools(self, request: Any, context: Any) -> rebuild_pb2.GetPoolsResponse:
        del request, context
        return self.pools

    async def Rebuild(self, request: Any, context: Any) -> rebuild_pb2.RebuildResponse:
        if refusal := self.refusals.get("Rebuild"):
            await context.abort_with_status(rpc_status.to_status(refusal.status))
        self.rebuilds.append(request)
        return self.rebuilt

    async def ApplyChatTemplate(
        self, request: Any, context: Any
    ) -> tokenization_pb2.ApplyChatTemplateResponse:
        del context
        prompt = render(request.chat)
        return tokenization_pb2.ApplyChatTemplateResponse(
            prompt=prompt, prompt_tokens=len(encode(prompt)) + 1
        )

    async def ConvertJsonSchema(
        self, request: Any, context: Any
    ) -> tokenization_pb2.ConvertJsonSchemaResponse:
        del request, context
        return tokenization_pb2.ConvertJsonSchemaResponse(grammar='root ::= "{}"')

    async def _take_model_call(self, name: str, context: Any) -> None:
        self.model_calls.put_nowait(name)
        refusal = self.refusals.get(name)
        if self.required_key is not None and _key(context) != f"Bearer {self.required_key}":
            refusal = failing(grpc.StatusCode.UNAUTHENTICATED, "BAD_API_KEY", "no such key")
        if refusal is not None:
            await context.abort_with_status(rpc_status.to_status(refusal.status))

    async def GetModel(self, request: Any, context: Any) -> model_pb2.GetModelResponse:
        del request
        await self._take_model_call("GetModel", context)
        return model_pb2.GetModelResponse(model=self.model)

    async def GetServerInfo(self, request: Any, context: Any) -> model_pb2.GetServerInfoResponse:
        del request
        await self._take_model_call("GetServerInfo", context)
        return model_pb2.GetServerInfoResponse(info=self.info)

    async def GetMetrics(self, request: Any, context: Any) -> model_pb2.GetMetricsResponse:
        del request
        await self._take_model_call("GetMetrics", context)
        return model_pb2.GetMetricsResponse(text=self.metrics)

    async def LoadModel(
        self, request: Any, context: Any
    ) -> AsyncIterator[model_pb2.LoadModelResponse]:
        self.loads.append(request)
        await self._take_model_call("LoadModel", context)
        for response in self.loading:
            yield response

    async def WatchModel(
        self, request: Any, context: Any
    ) -> AsyncIterator[model_pb2.WatchModelResponse]:
        del request
        if self.tenures is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED)
            return
        told = max(0, len(self.tenures) - 1)
        while True:
            while told < len(self.tenures):
                yield self.tenures[told]
                told += 1
            async with self._has_tenure:
                await self._has_tenure.wait()

    async def tell_tenure(self, model_id: str, *, changing: bool = False) -> None:
        """Tells all watchers of the model."""
        assert self.tenures is not None
        self.tenures.append(model_pb2.WatchModelResponse(model_id=model_id, changing=changing))
        await self.wake_watchers()

    async def wake_watchers(self) -> None:
        """Tells watchers of the model what they were not told yet."""
        async with self._has_tenure:
            self._has_tenure.notify_all()

    async def ListSlots(self, request: Any, context: Any) -> slot_pb2.ListSlotsResponse:
        del request, context
        return slot_pb2.ListSlotsResponse(slots=self.slots)

    async def EraseSlot(self, request: Any, context: Any) -> slot_pb2.EraseSlotResponse:
        del context
        self.erased.append(request.slot_id)
        return slot_pb2.EraseSlotResponse(slot_id=request.slot_id, erased_tokens=17)

    async def SaveSlot(self, request: Any, context: Any) -> slot_pb2.SaveSlotResponse:
        del context
        self.saved.append(request)
        has_prompt = request.WhichOneof("prompt") is not None
        return slot_pb2.SaveSlotResponse(
            slot_id=request.slot_id,
            filename=request.filename,
            saved_tokens=21,
            size_bytes=4096,
            elapsed=duration_pb2.Duration(nanos=1_500_000),
            cached_tokens=4 if has_prompt else 0,
            prefill_duration=duration_pb2.Duration(nanos=250_000_000) if has_prompt else None,
        )

    async def RestoreSlot(self, request: Any, context: Any) -> slot_pb2.RestoreSlotResponse:
        refusal = self.refusals.get("RestoreSlot")
        if refusal is not None:
            await context.abort_with_status(rpc_status.to_status(refusal.status))
        return slot_pb2.RestoreSlotResponse(
            slot_id=request.slot_id,
            filename=request.filename,
            restored_tokens=21,
            size_bytes=4096,
            elapsed=duration_pb2.Duration(nanos=2_500_000),
        )

    async def ListAdapters(self, request: Any, context: Any) -> lora_pb2.ListAdaptersResponse:
        del request, context
        return lora_pb2.ListAdaptersResponse(adapters=self.adapters)

    async def SetAdapterScales(
        self, request: Any, context: Any
    ) -> lora_pb2.SetAdapterScalesResponse:
        del context
        self.scales.append(request)
        return lora_pb2.SetAdapterScalesResponse(adapters=self.adapters)


def _model() -> model_pb2.Model:
    return model_pb2.Model(
        id="tiny.gguf",
        path="tiny.gguf",
        ftype="all F32",
        vocab_type=model_pb2.VOCAB_TYPE_SPM,
        vocab_size=VOCAB_SIZE,
        context_train_tokens=2048,
        embedding_size=64,
        num_params=292800,
        size_bytes=1171200,
        special_tokens=model_pb2.SpecialTokens(
            bos=model_pb2.SpecialToken(id=BOS, text="<s>"),
            eos=model_pb2.SpecialToken(id=EOS, text="</s>"),
            eog_ids=[EOS],
        ),
        add_bos=True,
        chat_template=model_pb2.ChatTemplate(source="{{ messages }}"),
    )


def _info() -> model_pb2.ServerInfo:
    breakers = common_pb2.StringList(values=["\n", ":", '"', "*"])
    chain = generation_pb2.SamplerChain(
        samplers=[value for value in generation_pb2.Sampler.values() if 1 <= value <= 9]
    )
    sampling = generation_pb2.SamplingParams(
        temperature=0.8,
        dynatemp_range=0,
        dynatemp_exponent=1,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        typical_p=1,
        top_n_sigma=-1,
        xtc_probability=0,
        xtc_threshold=0.1,
        repeat_last_n=64,
        repeat_penalty=1,
        frequency_penalty=0,
        presence_penalty=0,
        dry_multiplier=0,
        dry_base=1.75,
        dry_allowed_length=2,
        dry_penalty_last_n=64,
        dry_sequence_breakers=breakers,
        mirostat=generation_pb2.MIROSTAT_OFF,
        mirostat_tau=5,
        mirostat_eta=0.1,
        adaptive_target=-1,
        adaptive_decay=0.9,
        min_keep=0,
        samplers=chain,
    )
    return model_pb2.ServerInfo(
        version="0.1.0",
        build_info="b1-0000000",
        num_slots=2,
        slot_context_tokens=CONTEXT_TOKENS,
        queue_limit=256,
        queue_limit_bytes=64 << 20,
        defaults=generation_pb2.GenerationSettings(sampling=sampling, cache_prompt=True),
        features=model_pb2.Features(generation=True, slot_files=True),
        device="cpu",
    )

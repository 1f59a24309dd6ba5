"""ModelService: what is served, something else in its place, and how the server is and does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import cast

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from kvarts.v1 import embedding_pb2, model_pb2, model_pb2_grpc

from engine.requests import Pooling
from engine.types import Snapshot
from service import convert
from service.bridge import Bridge
from service.convert_swap import from_progress, from_swapped, to_swap_wish
from service.load_watch import LoadWatch
from service.loaded import LoadedModel
from service.metrics import Metrics, server_version
from service.poolings import WIRE_POOLINGS
from service.swap import ModelSwap
from service.validate import check_load_model

ModelRequest = model_pb2.GetModelRequest
ModelResponse = model_pb2.GetModelResponse
InfoRequest = model_pb2.GetServerInfoRequest
InfoResponse = model_pb2.GetServerInfoResponse
MetricsRequest = model_pb2.GetMetricsRequest
MetricsResponse = model_pb2.GetMetricsResponse
WatchRequest = model_pb2.WatchModelRequest
WatchResponse = model_pb2.WatchModelResponse
LoadRequest = model_pb2.LoadModelRequest
LoadResponse = model_pb2.LoadModelResponse


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Tells facts; `wall_clock` gives the time of day, seconds since 1970."""

    def __init__(
        self,
        bridge: Bridge,
        metrics: Metrics,
        swap: ModelSwap,
        wall_clock: Callable[[], float] = time.time,
        *,
        has_slot_folder: bool = False,
        queue_bytes: int = 0,
    ) -> None:
        self._bridge = bridge
        self._metrics = metrics
        self._swap = swap
        self._has_slot_folder = has_slot_folder
        self._queue_bytes = queue_bytes
        self._start_time = Timestamp()
        self._start_time.FromNanoseconds(round(wall_clock() * 1e9))

    async def GetModel(
        self, request: ModelRequest, context: grpc.aio.ServicerContext[ModelRequest, ModelResponse]
    ) -> ModelResponse:
        """Describes the model.

        Raises:
            EngineError: It is not there yet.
        """
        return ModelResponse(model=_model(self._bridge.model))

    async def GetServerInfo(
        self, request: InfoRequest, context: grpc.aio.ServicerContext[InfoRequest, InfoResponse]
    ) -> InfoResponse:
        """Describes the server: layout, defaults, features, load and totals.

        Raises:
            EngineError: The model is not there yet.
        """
        model, snapshot = self._bridge.model, self._bridge.snapshot()
        assert snapshot is not None
        info = _info(model, snapshot)
        info.start_time.CopyFrom(self._start_time)
        info.queue_limit_bytes = self._queue_bytes
        info.features.slot_files = self._has_slot_folder
        info.features.model_loading = self._swap.is_possible
        return InfoResponse(info=info)

    async def GetMetrics(
        self,
        request: MetricsRequest,
        context: grpc.aio.ServicerContext[MetricsRequest, MetricsResponse],
    ) -> MetricsResponse:
        """Tells the metrics of this moment."""
        return MetricsResponse(text=await asyncio.to_thread(self._metrics.text))

    async def WatchModel(
        self, request: WatchRequest, context: grpc.aio.ServicerContext[WatchRequest, WatchResponse]
    ) -> AsyncIterator[WatchResponse]:
        """Tells which model is served, now and whenever it is another or about to be.

        Raises:
            EngineError: There is none yet, or the server stops.
        """
        async with aclosing(self._bridge.tenures()) as tenures:
            async for now in tenures:
                yield WatchResponse(
                    tenure=now.number, model_id=now.model_id, changing=now.is_changing
                )

    async def LoadModel(
        self, request: LoadRequest, context: grpc.aio.ServicerContext[LoadRequest, LoadResponse]
    ) -> AsyncIterator[LoadResponse]:
        """Serves another model; a call that goes away stops it until the old one is let go.

        Raises:
            EngineError: It was refused or failed.
        """
        check_load_model(request)
        watch = LoadWatch()
        changing = self._swap.begin(to_swap_wish(request), watch)
        try:
            async with aclosing(watch.shown()) as shown:
                async for progress in shown:
                    yield LoadResponse(progress=from_progress(progress))
            swapped = await asyncio.shield(changing)
            yield LoadResponse(loaded=from_swapped(swapped, _model(swapped.model)))
        finally:
            self._swap.give_up(changing, watch)


def _model(model: LoadedModel) -> model_pb2.Model:
    names, facts, tokenizer = model.names, model.facts, model.tokenizer
    return model_pb2.Model(
        id=names.model_id,
        aliases=sorted(names.aliases),
        tags=sorted(names.tags),
        name=facts.name,
        path=names.path,
        architecture=facts.architecture,
        ftype=facts.ftype,
        # The contract numbers the families as llama.cpp does, plus one.
        vocab_type=cast("model_pb2.VocabType.ValueType", facts.vocab_type + 1),
        vocab_size=tokenizer.vocab_size,
        context_train_tokens=facts.context_train_tokens,
        embedding_size=facts.embedding_size,
        num_layers=facts.num_layers,
        num_params=facts.num_params,
        size_bytes=facts.size_bytes,
        special_tokens=_special_tokens(model),
        add_bos=tokenizer.add_bos,
        add_eos=tokenizer.add_eos,
        chat_template=_chat_template(model),
        pooling=_pooling(model),
        vocabulary=model.vocabulary,
    )


def _pooling(model: LoadedModel) -> embedding_pb2.Pooling.ValueType:
    if model.embedding is None:
        return embedding_pb2.POOLING_UNSPECIFIED
    return WIRE_POOLINGS[model.embedding.pooling]


def _chat_template(model: LoadedModel) -> model_pb2.ChatTemplate | None:
    facts = model.facts
    if facts.chat_template is None:
        return None
    return model_pb2.ChatTemplate(
        source=facts.chat_template,
        tool_use_source=facts.tool_use_template,
        capabilities=model_pb2.ChatTemplateCapabilities(**facts.chat_capabilities),
    )


def _special_tokens(model: LoadedModel) -> model_pb2.SpecialTokens:
    message = model_pb2.SpecialTokens(eog_ids=sorted(model.tokenizer.eog_tokens))
    for name, (token_id, text) in model.facts.special_tokens.items():
        token: model_pb2.SpecialToken = getattr(message, name)
        token.CopyFrom(model_pb2.SpecialToken(id=token_id, text=text))
    return message


def _info(model: LoadedModel, snapshot: Snapshot) -> model_pb2.ServerInfo:
    version = server_version()
    return model_pb2.ServerInfo(
        version=version,
        build_info=f"b0-{version}",
        num_slots=len(snapshot.slots),
        slot_context_tokens=snapshot.slots[0].context_tokens,
        queue_limit=snapshot.queue_limit,
        defaults=convert.from_defaults(model.defaults),
        features=model_pb2.Features(
            generation=not model.engine.is_encoder,
            embedding=model.embedding is not None,
            reranking=model.embedding is not None and model.embedding.pooling is Pooling.RANK,
            infill=model.facts.has_infill_tokens,
            unified_kv=model.is_unified,
            context_shift=model.has_context_shift,
            prefill_assistant=model.defaults.prefill_assistant,
            jinja=model.has_jinja and model.template is not None,
        ),
        counters=convert.from_counters(snapshot.counters),
        gauges=model_pb2.Gauges(running_requests=snapshot.running, queued_requests=snapshot.queued),
        pools=[convert.from_pool(pool) for pool in snapshot.pools],
        device=model.device,
        sleeping=snapshot.is_asleep,
    )

"""What a server of an encoder answers, over the fake device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from kvarts.v1 import embedding_pb2, generation_pb2, lora_pb2, model_pb2, slot_pb2

from engine.memory.planner import plan_memory
from engine.model.encoder_spec import ScoredState, ScoringSpec
from engine.model.scoring import ScoringHead
from engine.requests import Pooling
from engine.text.pairs import PairLayout
from service.defaults import EmbeddingDefaults
from tests.contract.serving import CONFIG, Serving, failure, serving
from tests.fake_text import FakeTokenizer
from tests.fakes import fake_shape, fitting_runner

Code = grpc.StatusCode
EmbedInput = embedding_pb2.EmbedInput
ENGINE = replace(CONFIG, embeds=True, chunk_tokens=64)
# Of the last token, its position and one, the first is the score.
HEAD = ScoringHead(
    ScoringSpec(ScoredState.LAST, has_dense=False, num_outputs=1),
    {"cls.output.weight": np.array([[1, 0, 0]], np.float32)},
)


def encoder(pooling: Pooling = Pooling.RANK, **changes: Any) -> Any:
    runner = fitting_runner(plan_memory(ENGINE, fake_shape(), 1 << 20))
    runner.max_texts, runner.max_chunk = 4, 64
    model = {"embedding": EmbeddingDefaults(pooling), "pairs": PairLayout((0,), (5,), (9,))}
    return serving(config=ENGINE, runner=runner, model=model, parts={"head": HEAD}, **changes)


def pair(query: str, document: str) -> EmbedInput:
    return EmbedInput(pair=embedding_pb2.RankPair(query=query, document=document))


async def test_pairs_are_laid_out_and_scored() -> None:
    async with encoder() as it:
        request = embedding_pb2.EmbedRequest(inputs=[pair("ab", "c"), pair("", "<s>")])
        reply = await it.embedding.Embed(request)
    assert reply.pooling == embedding_pb2.POOLING_RANK
    # The last token's id is the score, whatever the norm.
    assert [list(e.values) for e in reply.embeddings] == [[9.0], [9.0]]
    # Around the texts three tokens; texts are never special tokens.
    special = len(FakeTokenizer().encode("<s>", add_special=False, parse_special=False))
    assert [e.prompt_tokens for e in reply.embeddings] == [6, 3 + special]


async def test_its_features_say_so() -> None:
    async with encoder() as it:
        info = (await it.model.GetServerInfo(model_pb2.GetServerInfoRequest())).info
    assert info.features.embedding
    assert info.features.reranking
    assert not info.features.generation


async def _generate(it: Serving) -> Any:
    return await it.collect(generation_pb2.GenerateRequest(text="a"))


async def _save(it: Serving) -> Any:
    return await it.slots.SaveSlot(slot_pb2.SaveSlotRequest(slot_id=0, filename="a"))


async def _restore(it: Serving) -> Any:
    return await it.slots.RestoreSlot(slot_pb2.RestoreSlotRequest(slot_id=0, filename="a"))


async def _erase(it: Serving) -> Any:
    return await it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=0))


async def _scale(it: Serving) -> Any:
    scales = lora_pb2.SetAdapterScalesRequest()
    scales.scales.SetInParent()
    return await it.lora.SetAdapterScales(scales)


async def _load(it: Serving) -> Any:
    return await it.lora.LoadAdapter(lora_pb2.LoadAdapterRequest(name="a", path="a"))


async def _unload(it: Serving) -> Any:
    return await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=0))


@pytest.mark.parametrize(
    ("call", "feature"),
    [
        (_generate, "text generation"),
        (_save, "slots of an encoder"),
        (_restore, "slots of an encoder"),
        (_erase, "slots of an encoder"),
        (_scale, "adapters of an encoder"),
        (_load, "adapters of an encoder"),
        (_unload, "adapters of an encoder"),
    ],
)
async def test_what_it_has_not_is_not_supported(call: Any, feature: str, tmp_path: Path) -> None:
    async with encoder(slot_save_path=str(tmp_path)) as it:
        failed = await failure(call(it))
        assert (failed.code, failed.reason) == (Code.UNIMPLEMENTED, "NOT_SUPPORTED")
        assert feature in failed.text
        assert it.is_clean()

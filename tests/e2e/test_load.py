"""What a mixed load must not change: no program is compiled, and no bit of a probability moves."""

from __future__ import annotations

import asyncio
import random
import struct

import pytest
from kvarts.v1 import common_pb2, generation_pb2

from tests.e2e.conftest import NUM_SLOTS, SLOT_TOKENS, Server
from tests.e2e.rpc import Client
from tests.native import requires_native

pytestmark = pytest.mark.slow

_TOP = 40
# A token as a client sees it: its id, and the bits of the listed log-probabilities.
Seen = tuple[int, tuple[tuple[int, bytes], ...]]


async def _generate(
    rpc: Client, prompt: list[int], tokens: int, *, cache_prompt: bool = False
) -> list[Seen]:
    request = generation_pb2.GenerateRequest(
        tokens=common_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(temperature=0),
        max_tokens=tokens,
        ignore_eos=True,
        cache_prompt=cache_prompt,
        top_logprobs=_TOP,
    )
    seen: list[Seen] = []
    async for event in rpc.generation.Generate(request, metadata=rpc.metadata):
        if event.HasField("chunk"):
            listed = event.chunk.logprobs.top
            bits = tuple((entry.token_id, struct.pack("f", entry.logprob)) for entry in listed)
            seen.append((event.chunk.token_id, bits))
    return seen


def _prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [1, *(draw.randrange(3, 60) for _ in range(length - 1))]


async def test_no_length_of_prompt_or_answer_compiles_anything(server: Server) -> None:
    before = (await server.rpc.info()).counters.compiles
    draw = random.Random(4)
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 500, SLOT_TOKENS // 2]
    lengths += [draw.randrange(1, 700) for _ in range(2 * NUM_SLOTS)]
    answers = [draw.randrange(1, 40) for _ in lengths]
    got = await asyncio.gather(
        *(
            _generate(server.rpc, _prompt(length, i), tokens, cache_prompt=i % 2 == 0)
            for i, (length, tokens) in enumerate(zip(lengths, answers, strict=True))
        )
    )
    assert [len(seen) for seen in got] == answers
    assert (await server.rpc.info()).counters.compiles == before


@requires_native
async def test_no_bit_depends_on_the_company_or_on_the_chunks(server: Server) -> None:
    prompt = _prompt(150, 1)
    alone = await _generate(server.rpc, prompt, 24)
    assert len(alone) == 24
    batch = await asyncio.gather(
        *(
            _generate(server.rpc, _prompt(20 * i, i + 2) if i else prompt, 24)
            for i in range(NUM_SLOTS)
        )
    )
    assert batch[0] == alone, "in a batch of eight"
    for held in (1, 17, 40, 77, 149):
        # What is held already is not read again, so the chunks of the rest begin there.
        await _generate(server.rpc, prompt[:held], 1, cache_prompt=True)
        assert await _generate(server.rpc, prompt, 24, cache_prompt=True) == alone, f"{held} held"

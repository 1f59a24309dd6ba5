"""Eight clients on two slots of a whole server while a ninth saves, restores and erases those.

Nobody may notice: every answer is that of a lone run on another server, every file holds what some
request left behind, and what a client told before is read again only where the ninth erased it.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvarts.v1 import common_pb2, generation_pb2, slot_pb2

from tests.e2e.conftest import healthy, http_client
from tests.e2e.programs import Program, running
from tests.e2e.rpc import Client, client
from tests.native import requires_native

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_NUM_CLIENTS = 8
_NUM_TURNS = 5
_NUM_SLOTS = 2
_SLOT_TOKENS = 1024
_SYSTEM_TOKENS = 300
_ANSWER_TOKENS = 16
_NUM_ACTIONS = 32
_NUM_ERASES = 4


@dataclass(frozen=True)
class Turn:
    """A request of a client, what it was answered, and how much of it was reused."""

    client_id: int
    prompt: list[int]
    answer: list[int]
    cached: int

    def held(self) -> list[int]:
        """What the slot holds afterwards: the last token was sampled and never evaluated."""
        return [*self.prompt, *self.answer][:-1]


@dataclass
class Ninth:
    """What the ninth client did: the tokens of each file, and the prompts that it warmed."""

    files: dict[str, int] = field(default_factory=dict[str, int])
    warmed: list[list[int]] = field(default_factory=list[list[int]])
    restored: int = 0


@contextmanager
def _serving(model: Path, cache_dir: Path, slots: Path) -> Generator[Program]:
    """A server whose pool holds about half of what the clients tell: the host tier has work."""
    with running(
        "kvarts-server",
        *("-m", str(model), "--compile-cache", str(cache_dir / "xla"), "-ub", "32"),
        *("-c", str(_NUM_SLOTS * _SLOT_TOKENS), "-np", str(_NUM_SLOTS)),
        *("--port", "0", "--grpc-port", "0", "--slot-save-path", str(slots)),
    ) as program:
        yield program.ready()


def _system(seed: int) -> list[int]:
    """A prompt of its own from the first token on, so that no other client's can be reused."""
    draw = random.Random(seed)
    return [5 + seed, *(draw.randrange(3, 60) for _ in range(_SYSTEM_TOKENS - 1))]


async def _answered(
    http: httpx.AsyncClient, prompt: list[int], **more: Any
) -> tuple[list[int], int]:
    """Asks for an answer at temperature 0; returns its tokens and how many were reused."""
    body = {
        "prompt": prompt,
        "n_predict": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        **more,
    }
    reply = await http.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["tokens"], reply.json()["timings"]["cache_n"]


async def _streamed(rpc: Client, prompt: list[int]) -> tuple[list[int], int]:
    """The same through the other door, token by token."""
    request = generation_pb2.GenerateRequest(
        tokens=common_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(temperature=0),
        max_tokens=_ANSWER_TOKENS,
        ignore_eos=True,
        cache_prompt=True,
    )
    events = [event async for event in rpc.generation.Generate(request, metadata=rpc.metadata)]
    tokens = [event.chunk.token_id for event in events if event.HasField("chunk")]
    return tokens, events[-1].finished.cached_tokens


async def _talk(http: httpx.AsyncClient, rpc: Client, client_id: int, turns: list[Turn]) -> None:
    """A conversation: each turn repeats all before it. Every second client uses gRPC."""
    draw = random.Random(100 + client_id)
    said = _system(client_id)
    for _ in range(_NUM_TURNS):
        said = [*said, *(draw.randrange(3, 60) for _ in range(draw.randrange(1, 24)))]
        asked = _streamed(rpc, said) if client_id % 2 else _answered(http, said)
        answer, cached = await asked
        assert len(answer) == _ANSWER_TOKENS
        turns.append(Turn(client_id, said, answer, cached))
        said = [*said, *answer]


async def _act(http: httpx.AsyncClient, action: str, slot_id: int, **body: Any) -> dict[str, Any]:
    reply = await http.post(f"/slots/{slot_id}?action={action}", json=body)
    assert reply.status_code == 200, reply.text
    done = reply.json()
    assert done["id_slot"] == slot_id
    return done


async def _meddle(http: httpx.AsyncClient, done: Ninth) -> None:
    """Saves, warms, restores and erases in a fixed order that was drawn once."""
    draw = random.Random(9)
    erases = set(draw.sample(range(4, _NUM_ACTIONS), _NUM_ERASES))
    for number in range(_NUM_ACTIONS):
        slot_id = draw.randrange(_NUM_SLOTS)
        kind = draw.choice(("save", "warm", "restore")) if number >= 2 else "warm"
        if number in erases:
            await _act(http, "erase", slot_id)
        elif kind == "restore":
            name = draw.choice([name for name, tokens in done.files.items() if tokens])
            reply = await _act(http, "restore", slot_id, filename=name)
            assert reply["n_restored"] == done.files[name]
            done.restored += 1
        else:
            body: dict[str, Any] = {"filename": f"{kind}-{draw.randrange(4)}"}
            if kind == "warm":
                body["prompt"] = _system(20 + number)[: draw.randrange(30, 200)]
                done.warmed.append(body["prompt"])
            reply = await _act(http, "save", slot_id, **body)
            assert kind == "save" or reply["n_saved"] == len(body["prompt"])
            done.files[body["filename"]] = reply["n_saved"]
        listed = (await http.get("/slots")).json()
        assert [slot["id"] for slot in listed] == list(range(_NUM_SLOTS))


async def _listed(rpc: Client) -> list[slot_pb2.Slot]:
    request = slot_pb2.ListSlotsRequest()
    return list((await rpc.slots.ListSlots(request, metadata=rpc.metadata)).slots)


async def _settled(http: httpx.AsyncClient, rpc: Client, done: Ninth) -> None:
    """When all is quiet both lists, a save and an erase tell the same of each slot."""
    await rpc.idle()
    before = await _listed(rpc)
    shown = (await http.get("/slots")).json()
    assert [slot.id for slot in before] == [slot["id"] for slot in shown] == list(range(_NUM_SLOTS))
    assert not any(slot["is_processing"] for slot in shown)
    for slot in before:
        assert bool(slot.held_tokens) == bool(slot.num_pages)
        name = f"last-{slot.id}"
        saved = await _act(http, "save", slot.id, filename=name)
        assert saved["n_saved"] == slot.held_tokens
        done.files[name] = slot.held_tokens
        erased = await _act(http, "erase", slot.id)
        assert erased["n_erased"] == slot.held_tokens
    await rpc.idle()
    assert [(slot.held_tokens, slot.num_pages) for slot in await _listed(rpc)] == [
        (0, 0)
    ] * _NUM_SLOTS


def _tokens_of(path: Path) -> list[int]:
    """The token list of a slot's file, read as llama.cpp's sequence file."""
    content = path.read_bytes()
    magic, version, _, packed, _, count = struct.unpack_from("<IIIiII", content)
    assert (magic, version, packed) == (0x67677371, 3, -1)
    return list(struct.unpack_from(f"<{count}i", content, struct.calcsize("<IIIiII")))


def _reuse_is_right(turns: list[Turn]) -> None:
    """All told before is reused, but by those whom one of the erases took it from."""
    lost = 0
    for client_id in range(_NUM_CLIENTS):
        told = [turn for turn in turns if turn.client_id == client_id]
        assert told[0].cached == 0, "another client's tokens were reused"
        for before, turn in pairwise(told):
            assert turn.cached <= len(before.held())
            lost += turn.cached < len(before.held())
    assert lost <= _NUM_ERASES


@requires_native
async def test_eight_clients_on_two_slots_answer_as_alone(
    tiny_model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    turns: list[Turn] = []
    done = Ninth()
    with _serving(tiny_model, cache_dir, tmp_path) as program:
        url = await asyncio.to_thread(program.http_url)
        await healthy(url)
        async with http_client(url) as http, client(program.grpc_address()) as rpc:
            talks = [_talk(http, rpc, client_id, turns) for client_id in range(_NUM_CLIENTS)]
            await asyncio.gather(*talks, _meddle(http, done))
            assert len(turns) == _NUM_CLIENTS * _NUM_TURNS
            assert done.restored
            await _settled(http, rpc, done)
    _reuse_is_right(turns)
    left = [[], *(turn.held() for turn in turns), *done.warmed]
    files = {name: _tokens_of(tmp_path / name) for name in done.files}
    assert {name: len(tokens) for name, tokens in files.items()} == done.files
    assert all(tokens in left for tokens in files.values())

    with _serving(tiny_model, cache_dir, tmp_path) as program:
        url = await asyncio.to_thread(program.http_url)
        await healthy(url)
        async with http_client(url) as http:
            for turn in turns:
                alone = await _answered(http, turn.prompt, cache_prompt=False)
                assert (turn.answer, 0) == alone, f"client {turn.client_id}"
            for name, tokens in files.items():
                if not tokens:
                    continue
                longer = [*tokens, 9]
                cold = await _answered(http, longer, cache_prompt=False, id_slot=1)
                await _act(http, "restore", 0, filename=name)
                assert await _answered(http, longer, id_slot=0) == (cold[0], len(tokens)), name

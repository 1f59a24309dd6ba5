"""Three replicas behind a real Envoy with the shipped example, and one of them killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from kvarts.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    slot_pb2,
    slot_pb2_grpc,
)

from tests.certificates import needs_openssl
from tests.e2e.conftest import KEY, Start, healthy, http_client
from tests.e2e.envoy import Front, fronting
from tests.e2e.programs import Program
from tests.e2e.rpc import Client, bearer, client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_openssl]

_REPLICAS = 3
_SESSIONS_EACH = 2
_ANSWERS_EACH = 3
_TOKENS = 120
_SESSION = "x-session-id"
# A client gives up after so many tries; the first waits are short, as a router finds another at once.
_MOST_TRIES = 12
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
# UNAVAILABLE is a call that began nowhere, the others a stream that broke.
_RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED}


Answer = str | list[int]


class Lost(Exception):
    """An answer that did not come, or not to its end; the message says how."""


@dataclass(frozen=True)
class Job:
    """A prompt and the seed of its one answer."""

    prompt: list[int]
    seed: int
    num_tokens: int = _TOKENS


class Door(ABC):
    """One way to ask. `streaming` has the sessions whose answer has begun and not ended.

    `on_token` is called at each event of an answer, before anything else can happen.
    """

    def __init__(self) -> None:
        self.streaming: set[str] = set()
        self.on_token: Callable[[], None] = lambda: None
        self.lost = Counter[str]()

    async def answer(self, job: Job, session: str) -> Answer:
        """Asks until the whole answer has come, as a client with retry does."""
        wait_s = _FIRST_WAIT_S
        for _ in range(_MOST_TRIES):
            try:
                return await self._answer(job, session)
            except Lost as loss:
                self.lost[str(loss)] += 1
            finally:
                self.streaming.discard(session)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError(f"no answer in {_MOST_TRIES} tries: {self.lost}")

    def _seen(self, session: str) -> None:
        self.streaming.add(session)
        self.on_token()

    @abstractmethod
    def of(self, whole: dict[str, Any]) -> Answer:
        """What this door gives of a whole answer of `POST /completion`."""

    @abstractmethod
    async def _answer(self, job: Job, session: str) -> Answer: ...


class Http(Door):
    """Server-sent events of `POST /completion`, by their text.

    A stream names no token whose text ends within a character, as the peer's does not.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__()
        self.http = http

    def of(self, whole: dict[str, Any]) -> Answer:
        return whole["content"]

    async def _answer(self, job: Job, session: str) -> Answer:
        text = ""
        try:
            async with self.http.stream(
                "POST", "/completion", json=_body(job, stream=True), headers={_SESSION: session}
            ) as reply:
                if reply.status_code >= 500:
                    raise Lost(f"status {reply.status_code}")
                assert reply.status_code == 200, await reply.aread()
                async for line in reply.aiter_lines():
                    if not line:
                        continue
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Lost(f"event {event['error']['type']}")
                    text += event.get("content", "")
                    if event.get("stop"):
                        return text
                    self._seen(session)
        except httpx.TransportError as error:
            raise Lost(type(error).__name__) from error
        raise Lost("a stream without its end")


class Rpc(Door):
    """`GenerationService.Generate`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__()
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.slots = slot_pb2_grpc.SlotServiceStub(channel)

    def of(self, whole: dict[str, Any]) -> Answer:
        return whole["tokens"]

    async def _answer(self, job: Job, session: str) -> Answer:
        request = generation_pb2.GenerateRequest(
            tokens=common_pb2.TokenIds(ids=job.prompt),
            sampling=generation_pb2.SamplingParams(temperature=1, seed=job.seed),
            max_tokens=job.num_tokens,
            ignore_eos=True,
        )
        tokens: list[int] = []
        try:
            async for event in self._stub.Generate(request, metadata=metadata(session)):
                if event.HasField("chunk"):
                    tokens.append(event.chunk.token_id)
                    self._seen(session)
                if event.HasField("finished"):
                    return tokens
        except grpc.aio.AioRpcError as error:
            if error.code() not in _RETRIED:
                raise
            raise Lost(error.code().name) from error
        raise Lost("a stream without its end")


def metadata(session: str) -> tuple[tuple[str, str], ...]:
    return (*bearer(KEY), (_SESSION, session))


def _body(job: Job, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "prompt": job.prompt,
        "seed": job.seed,
        "temperature": 1,
        "n_predict": job.num_tokens,
        "ignore_eos": True,
        "return_tokens": True,
        "stream": stream,
        **more,
    }


def _job(seed: int, length: int, num_tokens: int = _TOKENS) -> Job:
    draw = random.Random(seed)
    return Job([1, *(draw.randrange(3, 60) for _ in range(length - 1))], seed, num_tokens)


@dataclass(frozen=True)
class Replica:
    """A server, and the ways to it that go round the front."""

    program: Program
    rpc: Client
    http: httpx.AsyncClient

    async def num_started(self) -> int:
        return (await self.rpc.info()).counters.requests_started


@dataclass(frozen=True)
class Fleet:
    """The replicas, and their front by both doors."""

    front: Front
    replicas: list[Replica]
    http: Http
    rpc: Rpc
    dead: set[int] = field(default_factory=set[int])

    async def owner(self, door: Door, session: str) -> int:
        """Which replica a session meets: the one whose count of requests rises."""
        living = [i for i in range(len(self.replicas)) if i not in self.dead]
        before = [await self.replicas[i].num_started() for i in living]
        await door.answer(_job(0, 4, num_tokens=1), session)
        after = [await self.replicas[i].num_started() for i in living]
        (owner,) = [i for i, old, new in zip(living, before, after, strict=True) if new != old]
        return owner

    async def sessions(self, door: Door) -> dict[str, int]:
        """So many sessions that each replica owns its share, with their owners."""
        owners: dict[str, int] = {}
        for number in itertools.count():
            session = f"session-{number}"
            owner = await self.owner(door, session)
            if list(owners.values()).count(owner) < _SESSIONS_EACH:
                owners[session] = owner
            if len(owners) == _SESSIONS_EACH * len(self.replicas):
                return owners
            assert number < 200, f"one of the replicas is never met: {owners}"
        raise AssertionError

    def kill(self, replica: int) -> None:
        """SIGKILL; its child, the gateway, ends by itself."""
        self.dead.add(replica)
        self.replicas[replica].program.process.send_signal(signal.SIGKILL)


@pytest.fixture
async def fleet(start: Start, tmp_path: Path) -> AsyncGenerator[Fleet]:
    slots = tmp_path / "slots"
    slots.mkdir()
    flags = ("--grpc-port", "0", "--api-key", KEY, "--slot-save-path", str(slots))
    async with contextlib.AsyncExitStack() as stack:
        programs = [stack.enter_context(start(*flags)) for _ in range(_REPLICAS)]
        replicas: list[Replica] = []
        for program in programs:
            url = (await asyncio.to_thread(program.ready)).http_url()
            await healthy(url)
            rpc = await stack.enter_async_context(client(program.grpc_address(), KEY))
            replicas.append(
                Replica(program, rpc, await stack.enter_async_context(http_client(url, KEY)))
            )
        http_ports = [urlsplit(program.http_url()).port or 0 for program in programs]
        grpc_ports = [int(program.grpc_address().rpartition(":")[2]) for program in programs]
        front = stack.enter_context(fronting(tmp_path, http_ports, grpc_ports))
        await front.sees(_REPLICAS)
        session = httpx.AsyncClient(
            base_url=f"https://{front.address}",
            verify=ssl.create_default_context(cafile=front.ca),
            headers={"authorization": f"Bearer {KEY}"},
            timeout=120,
        )
        http = await stack.enter_async_context(session)
        trust = grpc.ssl_channel_credentials(front.ca.read_bytes())
        channel = await stack.enter_async_context(grpc.aio.secure_channel(front.address, trust))
        yield Fleet(front, replicas, Http(http), Rpc(channel))


async def _lone(replica: Replica, job: Job) -> dict[str, Any]:
    reply = await replica.http.post("/completion", json=_body(job, cache_prompt=False))
    assert reply.status_code == 200, reply.text
    return reply.json()


async def _session_of(door: Door, session: str, jobs: Sequence[Job]) -> list[Answer]:
    return [await door.answer(job, session) for job in jobs]


async def test_a_killed_replica_costs_no_answer_and_its_slots_move(fleet: Fleet) -> None:
    owners = {door: await fleet.sessions(door) for door in (fleet.http, fleet.rpc)}
    for door, sessions in owners.items():
        for session, owner in sessions.items():
            assert await fleet.owner(door, session) == owner, "a session stays"

    keeper, victim = next(iter(owners[fleet.http].items()))
    held = _job(99, 300, num_tokens=8)
    headers = {_SESSION: keeper}
    first = await fleet.http.http.post("/completion", json=_body(held, id_slot=0), headers=headers)
    saved = await fleet.http.http.post(
        "/slots/0?action=save", json={"filename": "moves"}, headers=headers
    )
    assert saved.status_code == 200, saved.text
    assert saved.json()["n_saved"] == 300 + 7

    numbers = itertools.count(100)
    work = {
        (door, session): [_job(next(numbers), 40 + 9 * i) for i in range(_ANSWERS_EACH)]
        for door, sessions in owners.items()
        for session in sessions
    }
    survivor = fleet.replicas[(victim + 1) % _REPLICAS]
    alone = {
        (door, session): [door.of(await _lone(survivor, job)) for job in jobs]
        for (door, session), jobs in work.items()
    }

    def kill_amid_both() -> None:
        cut = [{one for one in door.streaming if owners[door][one] == victim} for door in owners]
        if all(cut) and not fleet.dead:
            fleet.kill(victim)

    for door in owners:
        door.on_token = kill_amid_both
    asking = {key: asyncio.create_task(_session_of(*key, jobs)) for key, jobs in work.items()}
    answers = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
    assert answers == alone
    killed = fleet.replicas[victim].program
    assert await asyncio.to_thread(killed.exit_status) == -signal.SIGKILL
    for door in owners:
        assert sum(door.lost.values()), "the kill met no answer on its way"

    await fleet.front.sees(_REPLICAS - 1)
    for door, sessions in owners.items():
        for session, owner in sessions.items():
            now = await fleet.owner(door, session)
            assert now == owner or owner == victim, "only the dead one's sessions move"

    heir = fleet.replicas[await fleet.owner(fleet.http, keeper)]
    restored = await fleet.http.http.post(
        "/slots/0?action=restore", json={"filename": "moves"}, headers=headers
    )
    assert restored.status_code == 200, restored.text
    assert restored.json()["n_restored"] == 300 + 7
    longer = Job([*held.prompt, *first.json()["tokens"], 9], 7)
    warm = await fleet.http.http.post("/completion", json=_body(longer, id_slot=0), headers=headers)
    assert warm.json()["timings"]["cache_n"] == 300 + 7
    assert warm.json()["tokens"] == (await _lone(heir, longer))["tokens"]

    mover = next(one for one, owner in owners[fleet.rpc].items() if owner == victim)
    request = slot_pb2.RestoreSlotRequest(slot_id=1, filename="moves")
    moved = await fleet.rpc.slots.RestoreSlot(request, metadata=metadata(mover))
    assert moved.restored_tokens == 300 + 7

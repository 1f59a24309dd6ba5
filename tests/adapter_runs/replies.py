"""What requests under changing sets of adapters got, and what each gets when it runs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.adapters.content import AdapterContent
from engine.adapters.loaded import NewAdapter
from engine.engine import Engine
from engine.requests import AdapterScale, Request, SamplingParams
from engine.types import Cancelled, Chunk, Event, Failed, Finished, Started

# A set by what it computes: digest and scale of each adapter that is on, sorted.
Members = tuple[tuple[bytes, float], ...]
Wait = Callable[[Future[Any]], Any]


@dataclass
class Reply:
    """What became of one request; `done` gets its last event."""

    request: Request
    started: Started | None = None
    tokens: list[int] = field(default_factory=list[int])
    done: Future[Event] = field(default_factory=Future[Event])


class Replies:
    """An engine's sink, and the only door to submit through."""

    def __init__(self) -> None:
        self.all: dict[str, Reply] = {}
        self._lock = threading.Lock()

    def take(self, events: Sequence[tuple[str, Event]]) -> None:
        """The sink."""
        for name, event in events:
            reply = self.all[name]
            match event:
                case Started():
                    assert reply.started is None
                    reply.started = event
                case Chunk():
                    reply.tokens.append(event.token_id)
                case Finished() | Failed() | Cancelled():
                    reply.done.set_result(event)
                case _:
                    pass

    def ask(
        self,
        engine: Engine,
        prompt: tuple[int, ...],
        max_tokens: int,
        adapters: tuple[AdapterScale, ...] | None,
        *,
        is_cold: bool = False,
    ) -> Reply:
        """Submits a greedy request.

        Raises:
            EngineError: It was refused.
        """
        with self._lock:
            name = f"r{len(self.all)}"
            request = Request(
                name,
                prompt,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=max_tokens,
                ignore_eos=True,
                cache_prompt=not is_cold,
                adapters=adapters,
            )
            reply = self.all[name] = Reply(request)
        try:
            engine.submit(request)
        except BaseException:
            with self._lock:
                # Only marked: a name must not be given twice.
                reply.done.cancel()
            raise
        return reply


def members_of(started: Started, digests: dict[int, bytes]) -> Members:
    """The set that a reply says it ran under."""
    return tuple(sorted((digests[one.adapter_id], one.scale) for one in started.adapters))


class SoloRuns:
    """Cold runs of single requests on an engine that is idle and holds no adapter."""

    def __init__(
        self, engine: Engine, replies: Replies, contents: Sequence[AdapterContent], wait: Wait
    ) -> None:
        self._engine = engine
        self._replies = replies
        self._contents = {content.facts.digest: content for content in contents}
        self._wait = wait
        self._known: dict[tuple[tuple[int, ...], Members], list[int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def tokens(self, prompt: tuple[int, ...], members: Members, max_tokens: int) -> list[int]:
        """The first tokens behind a prompt under a set."""
        known = self._known.get((prompt, members), [])
        if len(known) < max_tokens:
            known = self._known[prompt, members] = self._run(prompt, members, max_tokens)
        return known[:max_tokens]

    def _run(self, prompt: tuple[int, ...], members: Members, max_tokens: int) -> list[int]:
        desk = self._engine.adapters
        loaded: list[int] = []
        for number, (digest, _) in enumerate(members):
            new = NewAdapter(f"solo {number}", "solo", 0.0, self._contents[digest])
            loaded.append(self._wait(desk.load(new)).adapter_id)
        scales = tuple(
            AdapterScale(one, scale) for one, (_, scale) in zip(loaded, members, strict=True)
        )
        reply = self._replies.ask(self._engine, prompt, max_tokens, scales, is_cold=True)
        assert isinstance(self._wait(reply.done), Finished)
        for one in loaded:
            self._wait(desk.unload(one))
        return reply.tokens


def judge(replies: Sequence[Reply], digests: dict[int, bytes], solo: SoloRuns) -> int:
    """Compares every reply with its solo run; returns how many ran under adapters."""
    num_adapted = 0
    for reply in replies:
        if reply.started is None or not reply.tokens:
            continue
        members = members_of(reply.started, digests)
        most = reply.request.max_tokens
        assert most is not None
        expected = solo.tokens(reply.request.prompt, members, most)
        if isinstance(reply.done.result(), Finished):
            assert reply.tokens == expected, f"{reply.request} under {reply.started.adapters}"
        else:
            assert reply.tokens == expected[: len(reply.tokens)], f"{reply.request}"
        num_adapted += bool(members)
    return num_adapted

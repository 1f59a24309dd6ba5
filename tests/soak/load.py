"""The mixed load of a soak: what clients of a running server do, drawn at random.

Of all requests 10 % are cut off by their client and 5 % are wrong (check 32). Every answer is
looked at: one that is neither the expected nor a refusal with a time to come back is a fault.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

_CANCELS = 0.10
_ERRORS = 0.05
_MAX_TOKENS = 48
_PROMPT_TOKENS = 200
# The server may say that it is too busy, or in the middle of a rebuild.
_COME_BACK = 503
_BAD: tuple[tuple[str, Any], ...] = (
    ("/completion", {"prompt": [10**9], "n_predict": 4}),
    ("/completion", {"prompt": "x", "n_predict": "many"}),
    ("/completion", {"n_predict": 4}),
    ("/v1/chat/completions", {"messages": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
    ("/completion", {"prompt": "x", "grammar": "root ::= ("}),
    ("/slots/0?action=restore", {"filename": "../outside"}),
    ("/pools", {"kv_pages": -1}),
    ("/v1/embeddings", {}),
)


class Load:
    """The clients of one server, and what they saw."""

    def __init__(self, http: httpx.AsyncClient, num_slots: int, seed: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.latencies_ms: list[float] = []
        """Of whole completions since somebody emptied it."""
        self._http = http
        self._num_slots = num_slots
        self._draw = random.Random(seed)
        self._kv_pages: tuple[int, int] | None = None
        self._good: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self._complete, self._complete, self._stream, self._stream),
            *(self._chat, self._stream_chat, self._embed, self._tokenize),
            *(self._save, self._restore, self._erase, self._scale, self._watch),
        )

    @property
    def done(self) -> int:
        return sum(self.counts.values())

    async def work(self, until: float) -> None:
        """One client: one request after another until that time of the monotonic clock."""
        while time.monotonic() < until:
            kind = self._draw.random()
            if kind < _CANCELS:
                await self._cancel()
            elif kind < _CANCELS + _ERRORS:
                await self._err()
            else:
                await self._draw.choice(self._good)()

    async def rebuild(self) -> None:
        """Takes a quarter of the pages of keys and values away, or gives it back."""
        pools = (await self._http.get("/pools")).json()["pools"]
        size = next(pool["size"] for pool in pools if pool["kind"] == "kv")
        if self._kv_pages is None:
            self._kv_pages = (size, size - size // 4)
        whole, less = self._kv_pages
        wanted = less if size == whole else whole
        body = {"kv_pages": wanted, "drain_timeout": 60}
        # Beside other programs compiling may take minutes, while everything is served.
        reply = await self._http.post("/pools", json=body, timeout=None)
        self._is_good("rebuild", "/pools", reply)

    async def _complete(self) -> None:
        start = time.monotonic()
        reply = await self._post("completion", "/completion", self._completion())
        if reply is not None:
            self.latencies_ms.append(1000 * (time.monotonic() - start))

    async def _stream(self) -> None:
        await self._streamed("stream", "/completion", self._completion())

    async def _chat(self) -> None:
        await self._post("chat", "/v1/chat/completions", self._conversation())

    async def _stream_chat(self) -> None:
        await self._streamed("chat stream", "/v1/chat/completions", self._conversation())

    async def _cancel(self) -> None:
        """Goes away before the first event, or after some."""
        body = {**self._completion(), "n_predict": 4 * _MAX_TOKENS, "ignore_eos": True}
        await self._streamed("cancel", "/completion", body, events=self._draw.randrange(12))

    async def _err(self) -> None:
        path, body = self._draw.choice(_BAD)
        reply = await self._http.post(path, json=body)
        self.counts["error"] += 1
        if not 400 <= reply.status_code < 500:
            self._fault(f"{path} {body}", reply.status_code, reply.text)

    async def _embed(self) -> None:
        await self._post("embedding", "/v1/embeddings", {"input": self._text()})

    async def _tokenize(self) -> None:
        await self._post("tokenize", "/tokenize", {"content": self._text()})

    async def _save(self) -> None:
        await self._act("save", filename=f"soak-{self._draw.randrange(4)}")

    async def _restore(self) -> None:
        # Of four names the first times some are not there yet, and one may be too long by now.
        await self._act("restore", (400, 404), filename=f"soak-{self._draw.randrange(4)}")

    async def _erase(self) -> None:
        await self._act("erase")

    async def _act(self, action: str, also: tuple[int, ...] = (), **body: Any) -> None:
        path = f"/slots/{self._draw.randrange(self._num_slots)}?action={action}"
        await self._post(action, path, body, also)

    async def _scale(self) -> None:
        body = [{"id": 0, "scale": self._draw.choice((0.0, 0.5, 1.0))}]
        await self._post("scale", "/lora-adapters", body)

    async def _watch(self) -> None:
        for path in ("/metrics", "/slots", "/health", "/props", "/pools"):
            reply = await self._http.get(path)
            self.counts["watch"] += 1
            if reply.status_code not in (200, _COME_BACK):
                self._fault(path, reply.status_code, reply.text)

    async def _post(
        self, name: str, path: str, body: Any, also: tuple[int, ...] = ()
    ) -> httpx.Response | None:
        reply = await self._http.post(path, json=body)
        return reply if self._is_good(name, path, reply, also) else None

    async def _streamed(
        self, name: str, path: str, body: Mapping[str, Any], events: int | None = None
    ) -> None:
        """Reads a stream to its end, or away from it after so many events."""
        asked = {**body, "stream": True}
        async with self._http.stream("POST", path, json=asked) as reply:
            if reply.status_code != 200:
                await reply.aread()
            if not self._is_good(name, path, reply) or events == 0:
                return
            seen = 0
            async for line in reply.aiter_lines():
                if line.startswith("error:") or line.startswith('data: {"error"'):
                    self._fault(f"{name} {path}", reply.status_code, line)
                seen += line.startswith("data:")
                if seen == events:
                    return
        if not seen:
            self._fault(f"{name} {path}", reply.status_code, "a stream without an event")

    def _is_good(
        self, name: str, path: str, reply: httpx.Response, also: tuple[int, ...] = ()
    ) -> bool:
        if reply.status_code == _COME_BACK:
            self.counts[f"{name}: come back"] += 1
        elif reply.status_code == 200:
            self.counts[name] += 1
            return True
        elif reply.status_code in also:
            self.counts[f"{name}: {reply.status_code}"] += 1
        else:
            self.counts[f"{name}: {reply.status_code}"] += 1
            self._fault(f"{name} {path}", reply.status_code, reply.text)
        return False

    def _fault(self, what: str, status: int, text: str) -> None:
        self.faults.append(f"{what}: {status} {text[:300]}")

    def _completion(self) -> dict[str, Any]:
        draw = self._draw
        length = draw.randrange(1, _PROMPT_TOKENS)
        return {
            # Of few beginnings, so that prefixes are found again.
            "prompt": [1, *(5 + (i * (3 + draw.randrange(4))) % 40 for i in range(length))],
            "n_predict": draw.randrange(1, _MAX_TOKENS),
            "temperature": draw.choice((0.0, 0.8)),
            "cache_prompt": draw.random() < 0.8,
            "n_probs": draw.choice((0, 0, 3)),
        }

    def _conversation(self) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self._text()}],
            "max_tokens": self._draw.randrange(1, _MAX_TOKENS),
        }

    def _text(self) -> str:
        return " ".join(self._draw.choices(("once", "there", "was", "a", "girl", "big"), k=12))


async def steadily(action: Callable[[], Awaitable[None]], every_s: float, until: float) -> None:
    """Does `action` each `every_s` seconds while there is time for another."""
    due = time.monotonic() + every_s
    while due < until:
        await asyncio.sleep(max(due - time.monotonic(), 0))
        await action()
        due = max(due + every_s, time.monotonic())

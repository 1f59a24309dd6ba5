"""`python -m tests.bench.own_slots MODEL THREADS KERNELS CACHE`: our slots, saved and restored."""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from engine.loading import Loaded, load_engine
from engine.requests import Request, SamplingParams
from engine.scheduling.wishes import Restore, RestoredSlot, Save, SavedSlot
from engine.slots.store import SlotStore
from engine.types import Chunk, EngineConfig, Event, Finished
from tests.bench.child import answer_all

Result = TypeVar("Result")
CONTEXT_TOKENS = 8192
_CHUNK_TOKENS = 512
_PIECE_BYTES = 1 << 20
_STREAM_TOKENS = 200


class OwnSlots:
    """A running engine and a folder; times are seconds, rates bytes per second."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._events: queue.Queue[tuple[float, str, Event]] = queue.Queue()
        self._num_asked = 0
        self._prefills_s: dict[int, float] = {}
        self._loaded: Loaded
        self._store: SlotStore

    def open(self, loaded: Loaded) -> None:
        """Starts the engine and hashes the model."""
        self._loaded = loaded
        loaded.identity.run()
        self._store = SlotStore(
            self._folder,
            loaded.identity,
            vocab_size=loaded.tokenizer.vocab_size,
            context_tokens=loaded.plan.slot_context_tokens,
        )
        loaded.engine.start()

    def sink(self, events: Sequence[tuple[str, Event]]) -> None:
        """Takes a step's events, with their time."""
        now_s = time.perf_counter()
        for name, event in events:
            self._events.put((now_s, name, event))

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Measures what is asked for."""
        match question:
            case {"do": "restore", "tokens": tokens}:
                return self._restore_beside_prefill(tokens)
            case {"do": "disk", "bytes": num_bytes}:
                return {"disk": self._disk_rate(num_bytes), "sha256": _hash_rate(num_bytes)}
            case {"do": "stall", "tokens": tokens}:
                return self._stalls(tokens)
            case _:
                raise ValueError(f"no such question: {question}")

    def _restore_beside_prefill(self, tokens: int) -> dict[str, float]:
        """A state saved and restored; its prompt is computed once, the first time."""
        self._hold(tokens)
        saved, save_s = self._timed(self._save(0, tokens))
        _, restore_s = self._timed(self._restore(1, tokens))
        return {
            "prefill_s": self._prefills_s[tokens],
            "save_s": save_s,
            "restore_s": restore_s,
            "bytes": saved.size_bytes,
        }

    def _stalls(self, tokens: int) -> dict[str, float]:
        """The longest gap of a running stream while a slot is saved and restored, and a chunk."""
        began_s = time.perf_counter()
        self._ask(_prompt(_CHUNK_TOKENS), 2, max_tokens=1)
        chunk_s = time.perf_counter() - began_s
        self._hold(tokens)
        gaps: dict[str, float] = {"chunk": chunk_s}
        for name, start in (
            ("alone", None),
            ("save", lambda: self._save(0, tokens)),
            ("restore", lambda: self._restore(1, tokens)),
        ):
            stream = self._submit((1, 300, 301), 2, max_tokens=_STREAM_TOKENS)
            times = [self._token_s(stream) for _ in range(8)]
            wish = start() if start else None
            times += [self._token_s(stream) for _ in range(_STREAM_TOKENS - 8)]
            self._end(stream)
            if wish is not None:
                wish.done.result()
            gaps[name] = max(later - earlier for earlier, later in pairwise(times))
        return gaps

    def _hold(self, tokens: int) -> None:
        """Makes slot 0 hold a prompt of so many tokens, from a file if it was computed before."""
        if tokens in self._prefills_s:
            self._timed(self._restore(0, tokens))
            return
        began_s = time.perf_counter()
        self._ask(_prompt(tokens), 0, max_tokens=1)
        self._prefills_s[tokens] = time.perf_counter() - began_s

    def _save(self, slot_id: int, tokens: int) -> Save:
        fingerprint = self._store.identity.fingerprint()
        save = Save(slot_id, self._store.save_order(f"{tokens}.slot", "", fingerprint))
        self._loaded.engine.transfer_slot(save)
        return save

    def _restore(self, slot_id: int, tokens: int) -> Restore:
        fingerprint = self._store.identity.fingerprint()
        restore = Restore(slot_id, self._store.restore_order(f"{tokens}.slot", "", fingerprint))
        self._loaded.engine.transfer_slot(restore)
        return restore

    def _timed(self, wish: Save | Restore) -> tuple[SavedSlot | RestoredSlot, float]:
        done: Future[Any] = wish.done
        result: SavedSlot | RestoredSlot = done.result()
        return result, result.elapsed_s

    def _ask(self, prompt: tuple[int, ...], slot_id: int, *, max_tokens: int) -> None:
        self._end(self._submit(prompt, slot_id, max_tokens=max_tokens))

    def _submit(self, prompt: tuple[int, ...], slot_id: int, *, max_tokens: int) -> str:
        self._num_asked += 1
        name = f"r{self._num_asked}"
        self._loaded.engine.submit(
            Request(
                name,
                prompt,
                SamplingParams(temperature=0.0),
                max_tokens=max_tokens,
                ignore_eos=True,
                slot_id=slot_id,
                cache_prompt=False,
            )
        )
        return name

    def _token_s(self, request_id: str) -> float:
        while True:
            now_s, name, event = self._events.get(timeout=600)
            if name == request_id and isinstance(event, Chunk):
                return now_s

    def _end(self, request_id: str) -> None:
        while True:
            _, name, event = self._events.get(timeout=600)
            if name == request_id and isinstance(event, Finished):
                return

    def _disk_rate(self, num_bytes: int) -> float:
        """Writing as many bytes and making them durable, nothing else."""
        data = os.urandom(_PIECE_BYTES)
        path = Path(self._folder, "probe")
        began_s = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(num_bytes // _PIECE_BYTES):
                file.write(data)
            os.fsync(file.fileno())
        rate = num_bytes / (time.perf_counter() - began_s)
        path.unlink()
        return rate


def _hash_rate(num_bytes: int) -> float:
    data = os.urandom(_PIECE_BYTES)
    digest = hashlib.sha256()
    began_s = time.perf_counter()
    for _ in range(num_bytes // _PIECE_BYTES):
        digest.update(data)
    return num_bytes / (time.perf_counter() - began_s)


def _prompt(tokens: int) -> tuple[int, ...]:
    return tuple((7 * i + i // 11) % 900 + 50 for i in range(tokens))


def main(model: str, threads: str, kernel_kind: str, cache: str) -> None:
    """Answers until stdin ends."""
    config = EngineConfig(
        context_tokens=CONTEXT_TOKENS,
        num_slots=4,
        kv_pages=2 * CONTEXT_TOKENS // 32 + 64,
        chunk_tokens=_CHUNK_TOKENS,
        threads=int(threads),
        kernels=kernel_kind,
        compile_cache=cache,
    )
    with tempfile.TemporaryDirectory() as folder:
        slots = OwnSlots(folder)
        slots.open(load_engine(model, config, slots.sink))
        answer_all(slots.answer)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""An engine on a model's file with saved slots, driven step by step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from engine.adapters.loaded import NewAdapter
from engine.loading import Loaded, load_engine
from engine.requests import AdapterScale, Request, SamplingParams
from engine.scheduling.wishes import RestoredSlot, SavedSlot
from engine.slots.store import SlotStore
from engine.types import Chunk, EngineConfig, Event, Finished, Started
from tests.slot_stores import restore_wish, save_wish

Result = TypeVar("Result")
NAME = "a.slot"
_GREEDY = SamplingParams(temperature=0.0)


class Server:
    """An engine on a model's file, stepped by the test, and its saved slots."""

    def __init__(self, path: Path, config: EngineConfig, root: Path) -> None:
        self._events: list[tuple[str, Event]] = []
        self.loaded: Loaded = load_engine(path, config, self._events.extend)
        self.loaded.identity.run()
        self.store = SlotStore(
            str(root),
            self.loaded.identity,
            vocab_size=self.loaded.tokenizer.vocab_size,
            context_tokens=self.loaded.plan.slot_context_tokens,
            adapters=lambda: self.loaded.engine.snapshot().adapters,
        )
        self._num_asked = 0

    def load_adapter(self, path: Path) -> int:
        """Loads an adapter, switched off; returns its id."""
        adapters = self.loaded.engine.adapters
        done = adapters.load(NewAdapter(path.stem, str(path), 0.0, adapters.read(path)))
        self.loaded.engine.step()
        return done.result(0).adapter_id

    def answer(
        self,
        prompt: Sequence[int],
        slot_id: int,
        *,
        is_cold: bool = False,
        adapters: tuple[AdapterScale, ...] = (),
    ) -> list[int]:
        """The greedy answer, of 8 tokens."""
        self._num_asked += 1
        name = f"r{self._num_asked}"
        self.loaded.engine.submit(
            Request(
                name,
                tuple(prompt),
                _GREEDY,
                max_tokens=8,
                ignore_eos=True,
                slot_id=slot_id,
                cache_prompt=not is_cold,
                adapters=adapters,
            )
        )
        while not any(isinstance(e, Finished) for n, e in self._events if n == name):
            self.loaded.engine.step()
        return [e.token_id for n, e in self._events if n == name and isinstance(e, Chunk)]

    @property
    def cached(self) -> int:
        """Tokens that the last request reused."""
        return next(e.cached_tokens for _, e in reversed(self._events) if isinstance(e, Started))

    def save(self, slot_id: int, name: str = NAME) -> SavedSlot:
        wish = save_wish(self.store, slot_id, name)
        self.loaded.engine.transfer_slot(wish)
        return self._outcome(wish.done)

    def restore(self, slot_id: int, name: str = NAME) -> RestoredSlot:
        wish = restore_wish(self.store, slot_id, name)
        self.loaded.engine.transfer_slot(wish)
        return self._outcome(wish.done)

    def _outcome(self, done: Future[Result]) -> Result:
        while True:
            self.loaded.engine.step()
            try:
                return done.result(0.001)
            except TimeoutError:
                continue

"""Saving and restoring on every family: what goes on from a file is the cold run, token for token.

The second engine has another context, page size and slot, as a restarted server may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from engine.loading import Loaded, load_engine
from engine.scheduling.wishes import RestoredSlot, SavedSlot
from engine.slots.errors import SlotFileMismatch
from engine.slots.store import SlotStore
from engine.types import Chunk, EngineConfig, Event, Finished, Request, SamplingParams, Started
from tests.families import FAMILIES, write_family
from tests.recurrent_families import FAMILIES as RECURRENT
from tests.recurrent_families import VOCAB as RECURRENT_VOCAB
from tests.recurrent_families import write_recurrent
from tests.slot_stores import restore_wish, save_wish

Result = TypeVar("Result")
NAME = "a.slot"
# Longer than a page and a window; their turn is cut off again below.
PROMPT = tuple((7 * i + i * i) % (RECURRENT_VOCAB - 10) + 5 for i in range(90))
_CONFIG = EngineConfig(context_tokens=256, num_slots=1, page_tokens=32, chunk_tokens=32)
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
        )
        self._num_asked = 0

    def answer(self, prompt: Sequence[int], slot_id: int, *, is_cold: bool = False) -> list[int]:
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
            )
        )
        while not any(isinstance(e, Finished) for n, e in self._events if n == name):
            self.loaded.engine.step()
        return [e.token_id for n, e in self._events if n == name and isinstance(e, Chunk)]

    @property
    def cached(self) -> int:
        """Tokens that the last request reused."""
        return next(e.cached_tokens for _, e in reversed(self._events) if isinstance(e, Started))

    def save(self, slot_id: int) -> SavedSlot:
        wish = save_wish(self.store, slot_id, NAME)
        self.loaded.engine.transfer_slot(wish)
        return self._outcome(wish.done)

    def restore(self, slot_id: int) -> RestoredSlot:
        wish = restore_wish(self.store, slot_id, NAME)
        self.loaded.engine.transfer_slot(wish)
        return self._outcome(wish.done)

    def _outcome(self, done: Future[Result]) -> Result:
        while True:
            self.loaded.engine.step()
            try:
                return done.result(0.001)
            except TimeoutError:
                continue


def _check(path: Path, kv_dtype: str) -> None:
    slots = path.with_suffix(".slots")
    slots.mkdir()
    first = Server(path, replace(_CONFIG, kv_dtype=kv_dtype), slots)
    answer = first.answer(PROMPT, 0)
    assert first.save(0).tokens == len(PROMPT) + 7
    is_recurrent = first.loaded.spec.num_recurrent_layers > 0
    del first
    other = replace(_CONFIG, kv_dtype=kv_dtype, context_tokens=224, num_slots=2, page_tokens=16)
    second = Server(path, other, slots)
    assert second.restore(1).tokens == len(PROMPT) + 7
    held = (*PROMPT, *answer[:-1])
    longer = (*held, answer[-1], 9)
    warm = second.answer(longer, 1)
    assert second.cached == len(held)
    assert warm == second.answer(longer, 0, is_cold=True)
    second.restore(1)
    if is_recurrent:
        # A state goes on at its own position only: the file has one of the prompt but one token.
        assert second.answer(PROMPT, 1) == answer
        assert second.cached == len(PROMPT) - 1
    else:
        assert second.answer(held, 1)[0] == answer[-1]
        assert second.cached == len(held) - 1
    second.loaded.engine.check_integrity()


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_saved_slot_goes_on_like_the_cold_run(tmp_path: Path, name: str, kv_dtype: str):
    _check(write_family(tmp_path / "tiny.gguf", FAMILIES[name], has_tokenizer=True), kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"llama", "gemma3"}))
def test_every_family_goes_on_from_a_file(tmp_path: Path, name: str):
    _check(write_family(tmp_path / "tiny.gguf", FAMILIES[name], has_tokenizer=True), "f16")


def test_a_state_goes_on_like_the_cold_run(tmp_path: Path):
    _check(write_recurrent(tmp_path / "tiny.gguf", "falcon-h1", has_tokenizer=True), "f16")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_every_recurrent_family_goes_on_from_a_file(tmp_path: Path, name: str, kv_dtype: str):
    _check(write_recurrent(tmp_path / "tiny.gguf", name, has_tokenizer=True), kv_dtype)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "field"),
    [("llama", "f32", "kv_type"), ("qwen2", "f16", "rope"), ("qwen3", "f16", "head_dim")],
)
def test_state_of_another_engine_is_refused_by_field(
    tmp_path: Path, name: str, kv_dtype: str, field: str
):
    path = write_family(tmp_path / "tiny.gguf", FAMILIES["llama"], has_tokenizer=True)
    first = Server(path, _CONFIG, tmp_path)
    first.answer(PROMPT, 0)
    first.save(0)
    other = write_family(tmp_path / "other.gguf", FAMILIES[name], has_tokenizer=True)
    second = Server(other, replace(_CONFIG, kv_dtype=kv_dtype), tmp_path)
    with pytest.raises(SlotFileMismatch) as caught:
        second.restore(0)
    assert caught.value.field == field

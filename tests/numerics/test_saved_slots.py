"""Saving and restoring on every family: what goes on from a file is the cold run, token for token.

The second engine has another context, page size and slot, as a restarted server may have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.slots.errors import SlotFileMismatch
from engine.types import EngineConfig
from tests.families import FAMILIES, SHORT_CONTEXT, write_family
from tests.numerics.saved_server import Server
from tests.recurrent_families import FAMILIES as RECURRENT
from tests.recurrent_families import VOCAB as RECURRENT_VOCAB
from tests.recurrent_families import write_recurrent

# Longer than a page and a window; their turn is cut off again below.
PROMPT = tuple((7 * i + i * i) % (RECURRENT_VOCAB - 10) + 5 for i in range(90))
_CONFIG = EngineConfig(context_tokens=512, num_slots=1, page_tokens=32, chunk_tokens=32)
# Up to its context of training Phi-3 has other factors of rotation: that of this one lies below the
# contexts of both engines, 512 and 256 tokens of a slot.
_LONG_PHI3 = replace(
    FAMILIES["phi3"], keys={**FAMILIES["phi3"].keys, "rope.scaling.original_context_length": 128}
)


def _check(path: Path, kv_dtype: str) -> None:
    slots = path.with_suffix(".slots")
    slots.mkdir()
    first = Server(path, replace(_CONFIG, kv_dtype=kv_dtype), slots)
    answer = first.answer(PROMPT, 0)
    assert first.save(0).tokens == len(PROMPT) + 7
    is_recurrent = first.loaded.spec.num_recurrent_layers > 0
    context_tokens = first.loaded.plan.slot_context_tokens
    del first
    other = replace(_CONFIG, kv_dtype=kv_dtype, context_tokens=256, num_slots=2, page_tokens=16)
    second = Server(path, other, slots)
    assert second.loaded.plan.slot_context_tokens < context_tokens
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


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama", "f16"),
        ("llama", "f32"),
        ("gemma3", "f16"),
        ("gemma3", "f32"),
        ("deepseek2", "f16"),
    ],
)
def test_a_saved_slot_goes_on_like_the_cold_run(tmp_path: Path, name: str, kv_dtype: str):
    _check(write_family(tmp_path / "tiny.gguf", FAMILIES[name], has_tokenizer=True), kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"llama", "gemma3"}))
def test_every_family_goes_on_from_a_file(tmp_path: Path, name: str, kv_dtype: str):
    family = _LONG_PHI3 if name == "phi3" else FAMILIES[name]
    _check(write_family(tmp_path / "tiny.gguf", family, has_tokenizer=True), kv_dtype)


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


@pytest.mark.slow
def test_state_of_long_contexts_is_refused_in_a_short_one(tmp_path: Path):
    """Its keys are turned by the factors of long contexts, which an engine with less has not."""
    path = write_family(tmp_path / "tiny.gguf", FAMILIES["phi3"], has_tokenizer=True)
    first = Server(path, replace(_CONFIG, context_tokens=2 * SHORT_CONTEXT), tmp_path)
    first.answer(PROMPT, 0)
    first.save(0)
    second = Server(path, replace(_CONFIG, context_tokens=SHORT_CONTEXT), tmp_path)
    with pytest.raises(SlotFileMismatch) as caught:
        second.restore(0)
    assert caught.value.field == "rope"

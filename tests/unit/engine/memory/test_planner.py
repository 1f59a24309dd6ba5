from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidField
from engine.memory.planner import KvShape, num_kv_pages, plan_memory, slot_context_tokens
from engine.types import EngineConfig

SHAPE = KvShape(num_layers=3, num_kv_heads=2, key_dim=64, value_dim=48)


# (context, slots, unified, training) and llama.cpp's n_ctx_slot for it: whole or share, rounded up
# to 256, capped by the training context.
@pytest.mark.parametrize(
    ("context", "slots", "unified", "training", "expected"),
    [
        (512, 2, False, 8192, 256),
        (512, 2, True, 8192, 512),
        (500, 2, True, 8192, 512),
        (500, 2, False, 8192, 256),
        (1000, 3, False, 8192, 512),
        (1, 4, False, 8192, 256),
        (8192, 1, True, 512, 512),
        (8192, 2, False, 512, 512),
        (300, 1, True, 300, 300),
        (0, 1, True, 2048, 2048),
        (0, 4, False, 2048, 512),
    ],
)
def test_slot_context(
    context: int, slots: int, unified: bool, training: int, expected: int
) -> None:
    config = EngineConfig(context_tokens=context, num_slots=slots, unified=unified)
    assert slot_context_tokens(config, training) == expected


@pytest.mark.parametrize(
    ("context", "slots", "unified", "page", "expected"),
    [
        (512, 4, True, 32, 16 + 4),
        (500, 4, True, 32, 16 + 4),
        (512, 2, False, 32, 16 + 2),
        (1000, 3, False, 64, 24 + 3),
        (256, 1, True, 100, 3 + 1),
    ],
)
def test_pages_hold_the_context_and_one_more_a_slot(
    context: int, slots: int, unified: bool, page: int, expected: int
) -> None:
    config = EngineConfig(
        context_tokens=context, num_slots=slots, unified=unified, page_tokens=page
    )
    assert num_kv_pages(config, 1 << 20) == expected


def test_given_pages_are_taken_as_given() -> None:
    config = EngineConfig(context_tokens=4096, kv_pages=7)
    assert plan_memory(config, SHAPE, 4096).kv_pages == 7


@pytest.mark.parametrize(("kv_dtype", "element_bytes"), [("f16", 2), ("f32", 4)])
def test_bytes(kv_dtype: str, element_bytes: int) -> None:
    config = EngineConfig(context_tokens=256, num_slots=1, kv_dtype=kv_dtype)
    plan = plan_memory(config, SHAPE, 4096)
    assert plan.page_bytes == 32 * 3 * 2 * (64 + 48) * element_bytes
    # 8 pages for 256 tokens, one for the slot, and the sink.
    assert plan.kv_bytes == 10 * plan.page_bytes


@given(
    context=st.integers(0, 1 << 40),
    slots=st.integers(1, 256),
    unified=st.booleans(),
    page=st.integers(1, 1024),
    training=st.integers(1, 1 << 40),
)
def test_every_slot_could_fill_its_context_alone(
    context: int, slots: int, unified: bool, page: int, training: int
) -> None:
    config = EngineConfig(
        context_tokens=context, num_slots=slots, unified=unified, page_tokens=page
    )
    plan = plan_memory(config, SHAPE, training)
    assert 1 <= plan.slot_context_tokens <= training
    assert plan.kv_pages * page >= plan.slot_context_tokens
    if not unified:
        # Split contexts never have to wait for each other.
        assert plan.kv_pages >= slots * -(-plan.slot_context_tokens // page)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context_tokens", -1, "context_tokens: must be at least 0, got -1"),
        ("num_slots", 0, "num_slots: must be at least 1, got 0"),
        ("page_tokens", 0, "page_tokens: must be at least 1, got 0"),
        ("chunk_tokens", 0, "chunk_tokens: must be at least 1, got 0"),
        ("queue_requests", 0, "queue_requests: must be at least 1, got 0"),
        ("queue_bytes", 0, "queue_bytes: must be at least 1, got 0"),
        ("kv_pages", 1, "kv_pages: must be at least 2, got 1"),
        ("kv_dtype", "q8_0", "kv_dtype: must be one of f16, f32, got 'q8_0'"),
        ("slot_similarity", 1.5, r"slot_similarity: must be in \[0, 1\], got 1.5"),
        ("slot_similarity", float("nan"), "got nan"),
    ],
)
def test_refusals_name_the_field_and_the_limit(field: str, value: object, message: str) -> None:
    config = dataclasses.replace(EngineConfig(context_tokens=256), **{field: value})
    with pytest.raises(InvalidField, match=message):
        plan_memory(config, SHAPE, 2048)


def test_a_model_needs_a_training_context() -> None:
    with pytest.raises(InvalidField, match="training_tokens: must be at least 1, got 0"):
        plan_memory(EngineConfig(context_tokens=256), SHAPE, 0)

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidField
from engine.memory.planner import (
    KvShape,
    StatePlan,
    WindowPlan,
    num_kv_pages,
    plan_memory,
    slot_context_tokens,
    swa_floor,
)
from engine.types import EngineConfig

SHAPE = KvShape(num_layers=3, num_kv_heads=2, key_dim=64, value_dim=48)
WINDOWED = dataclasses.replace(SHAPE, num_window_layers=5, window=512)


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


def test_a_slot_may_have_less_than_its_share() -> None:
    config = EngineConfig(context_tokens=2048, num_slots=2, slot_tokens=300)
    assert slot_context_tokens(config, 8192) == 300
    assert slot_context_tokens(config, 200) == 200
    assert slot_context_tokens(dataclasses.replace(config, slot_tokens=0), 8192) == 2048
    assert num_kv_pages(config, 8192) == 64 + 2


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


def windowed(config: EngineConfig, shape: KvShape = WINDOWED) -> WindowPlan:
    window = plan_memory(config, shape, 1 << 20).window
    assert window is not None
    return window


# Per slot ceil((window + 16 + max(interval, chunk)) / page) + 1, or the context if that is less.
@pytest.mark.parametrize(
    ("window", "interval", "chunk", "page", "slot_tokens", "expected"),
    [
        (512, 128, 512, 32, 4096, 33 + 1),  # 1040 / 32 = 32.5
        (512, 128, 64, 32, 4096, 21 + 1),  # 656 / 32 = 20.5
        (512, 600, 64, 16, 4096, 71 + 1),  # 1128 / 16 = 70.5
        (512, 128, 512, 64, 4096, 17 + 1),  # 1040 / 64 = 16.25
        (1, 1, 15, 32, 4096, 1 + 1),
        (512, 128, 512, 32, 1024, 32),
        (4096, 128, 512, 32, 100, 4),
    ],
)
def test_swa_floor(
    window: int, interval: int, chunk: int, page: int, slot_tokens: int, expected: int
) -> None:
    config = EngineConfig(
        context_tokens=0, page_tokens=page, chunk_tokens=chunk, swa_evict_interval=interval
    )
    assert swa_floor(dataclasses.replace(config, num_slots=1), window, slot_tokens) == expected
    assert swa_floor(dataclasses.replace(config, num_slots=6), window, slot_tokens) == 6 * expected


def test_the_window_pool_has_its_floor_unless_more_is_asked_for() -> None:
    config = EngineConfig(context_tokens=8192, num_slots=2)
    window = windowed(config)
    assert (window.window, window.interval_tokens) == (512, 128)
    assert window.pages == window.floor == 2 * 34
    assert window.page_bytes == 32 * 5 * 2 * (64 + 48) * 2
    more = windowed(dataclasses.replace(config, swa_pages=100))
    assert (more.pages, more.floor) == (100, 68)


def test_the_kv_pool_holds_only_the_layers_that_see_everything() -> None:
    plan = plan_memory(EngineConfig(context_tokens=8192), WINDOWED, 1 << 20)
    assert plan.page_bytes == 32 * 3 * 2 * (64 + 48) * 2
    assert plan_memory(EngineConfig(context_tokens=8192), SHAPE, 1 << 20).window is None


def test_swa_pages_below_the_floor_are_refused_by_name() -> None:
    config = EngineConfig(context_tokens=8192, num_slots=2, swa_pages=67)
    with pytest.raises(InvalidField, match="swa_pages: must be at least 68, got 67"):
        plan_memory(config, WINDOWED, 1 << 20)


def test_a_model_without_windows_has_no_swa_pages() -> None:
    config = EngineConfig(context_tokens=8192, swa_pages=500)
    with pytest.raises(InvalidField, match="swa_pages: the model has no sliding-window layers"):
        plan_memory(config, SHAPE, 1 << 20)


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
        ("swa_evict_interval", 0, "swa_evict_interval: must be at least 1, got 0"),
        ("queue_requests", 0, "queue_requests: must be at least 1, got 0"),
        ("queue_bytes", 0, "queue_bytes: must be at least 1, got 0"),
        ("kv_pages", 1, "kv_pages: must be at least 2, got 1"),
        ("memory_budget", 0, "memory_budget: must be at least 1, got 0"),
        ("kv_reserve_tokens", -1, "kv_reserve_tokens: must be at least 0, got -1"),
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


STATEFUL = KvShape(1, 1, 8, 8, state_bytes=1000)


def test_states_are_three_for_each_slot_unless_said() -> None:
    plan = plan_memory(EngineConfig(256, num_slots=4), STATEFUL, 4096).states
    assert plan == StatePlan(states=12, floor=4, state_bytes=1000, interval_tokens=1024)
    config = EngineConfig(256, num_slots=4, mamba_slots=4, snapshot_interval=33)
    assert plan_memory(config, STATEFUL, 4096).states == StatePlan(4, 4, 1000, 64)


def test_fewer_states_than_running_rows_are_refused() -> None:
    with pytest.raises(InvalidField, match="mamba_slots: must be at least 4, got 3"):
        plan_memory(EngineConfig(256, num_slots=4, mamba_slots=3), STATEFUL, 4096)


def test_states_of_a_model_without_recurrent_layers_are_refused() -> None:
    with pytest.raises(InvalidField, match="mamba_slots: the model has no recurrent layers"):
        plan_memory(EngineConfig(256, mamba_slots=4), KvShape(1, 1, 8, 8), 4096)


STATES_ONLY = KvShape(0, 0, 0, 0, state_bytes=8)


def test_pages_without_bytes_limit_no_context() -> None:
    plan = plan_memory(EngineConfig(512, num_slots=2), STATES_ONLY, 4096)
    # Each slot may fill its 512 tokens, and one page more.
    assert (plan.kv_pages, plan.page_bytes, plan.kv_bytes) == (2 * (16 + 1), 0, 0)


@pytest.mark.parametrize("field", ["kv_pages", "kv_reserve_tokens"])
def test_pages_without_bytes_cannot_be_asked_for(field: str) -> None:
    config = dataclasses.replace(EngineConfig(512), **{field: 64})
    with pytest.raises(InvalidField, match=f"{field}: the model keeps no keys and values"):
        plan_memory(config, STATES_ONLY, 4096)


def test_a_reserve_of_tokens_is_a_floor_of_pages() -> None:
    config = EngineConfig(256, num_slots=1, kv_reserve_tokens=100)
    assert (
        plan_memory(config, SHAPE, 4096).kv_floor,
        plan_memory(config, SHAPE, 4096).kv_pages,
    ) == (
        4,
        9,
    )
    more = dataclasses.replace(config, kv_reserve_tokens=1000)
    assert plan_memory(more, SHAPE, 4096).kv_pages == 32
    assert plan_memory(EngineConfig(256), SHAPE, 4096).kv_floor == 2
    given = dataclasses.replace(more, kv_pages=31)
    with pytest.raises(InvalidField, match="kv_pages: must be at least 32, got 31"):
        plan_memory(given, SHAPE, 4096)

"""The real engine on a device, a clock, a tokenizer and a chain without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.desk import NO_ADAPTERS, AdapterSetup
from engine.adapters.fit import TargetModel
from engine.engine import Engine
from engine.engine_parts import EngineParts
from engine.failpoints import Failpoints
from engine.memory.planner import KvShape, MemoryPlan, plan_memory
from engine.types import (
    EngineConfig,
    EventSink,
)
from tests.fake_runner import FakeRunner
from tests.fake_text import FakeTokenizer, PlainText, begin_greedy


class FakeClock:
    """Time that moves only when a test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def fake_engine(
    sink: EventSink,
    *,
    config: EngineConfig | None = None,
    runner: FakeRunner | None = None,
    clock: Callable[[], float] | None = None,
    failpoints: Failpoints | None = None,
    training_tokens: int = 1 << 20,
    window: int | None = None,
    num_adapters: int = 0,
    is_recurrent: bool = False,
    **changes: Any,
) -> Engine:
    """The real engine over the fakes, not started. The default has 4 slots of 256 tokens.

    With a `window` the model has a layer of it, if `is_recurrent` one with a state; a given runner
    then needs the same.
    """
    config = config or EngineConfig(context_tokens=256, num_slots=4, page_tokens=16)
    plan = plan_memory(config, fake_shape(window, is_recurrent), training_tokens)
    error_ids = iter(range(1 << 62))
    runner = runner or fitting_runner(plan)
    if runner.num_experts:
        changes["experts"] = runner.expert_pool
    parts = EngineParts(
        runner=runner,
        adapters=_adapter_setup(runner, num_adapters),
        tokenizer=FakeTokenizer(),
        begin_chain=begin_greedy,
        begin_text=PlainText,
        clock=clock or FakeClock(),
        draw_seed=lambda: 42,
        new_error_id=lambda: f"error-{next(error_ids)}",
        failpoints=failpoints or Failpoints(),
        **changes,
    )
    return Engine(config, plan, parts, sink=sink)


def _adapter_setup(runner: FakeRunner, count: int) -> AdapterSetup:
    if not count:
        return NO_ADAPTERS
    runner.num_places = count
    model = TargetModel("fake", runner.vocab_size, {"blk.0.attn_q.weight": (4, 4)})
    return AdapterSetup(runner, AdapterCapacity(count=count, rank=4), model)


def fitting_runner(plan: MemoryPlan, num_experts: int = 0) -> FakeRunner:
    """A runner with the pools of a plan, and experts in memory."""
    return FakeRunner(
        plan.kv_pages,
        plan.page_tokens,
        window=plan.window.window if plan.window else None,
        num_window_pages=plan.window.pages if plan.window else 0,
        num_states=plan.states.states if plan.states else 0,
        num_experts=num_experts,
    )


def fake_shape(window: int | None = None, is_recurrent: bool = False) -> KvShape:
    """Two layers that see everything, one that sees only a `window`, and one with a state."""
    return KvShape(
        num_layers=2,
        num_kv_heads=2,
        key_dim=8,
        value_dim=8,
        num_window_layers=0 if window is None else 1,
        window=window or 0,
        state_bytes=100 if is_recurrent else 0,
    )

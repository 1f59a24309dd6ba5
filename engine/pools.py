"""The books of all pools of one engine: who holds what, how large they are and may become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.host_tier import HostTier
from engine.memory.pages import PageAllocator
from engine.memory.planner import MemoryPlan
from engine.memory.prefix_index import PrefixIndex
from engine.memory.split import MemoryLimits, PoolSizes, SplitShape, shape_of
from engine.slots.states import RecurrentStates
from engine.slots.table import SlotTable
from engine.slots.window import WindowPages, WindowPolicy
from engine.step import PageStore
from engine.types import EngineConfig, ExpertFigures, PoolInfo


@dataclass(frozen=True)
class Pools:
    """`experts` tells how the moe_cache pool of a model that has one stands."""

    plan: MemoryPlan
    pages: PageAllocator
    table: SlotTable
    limits: MemoryLimits
    experts: Callable[[], tuple[PoolInfo, ExpertFigures]] | None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        plan: MemoryPlan,
        store: PageStore,
        limits: MemoryLimits,
        experts: Callable[[], tuple[PoolInfo, ExpertFigures]] | None,
    ) -> Pools:
        """Makes empty pools of the sizes of a plan."""
        pages = PageAllocator(plan.kv_pages)
        host = HostTier(store, limit_bytes=config.host_cache_bytes)
        table = SlotTable(
            config.num_slots,
            context_tokens=plan.slot_context_tokens,
            page_tokens=plan.page_tokens,
            pages=pages,
            similarity=config.slot_similarity,
            windows=_window_pages(plan),
            index=PrefixIndex(pages, plan.page_tokens, host),
            states=_states(config, plan),
        )
        return cls(plan, pages, table, limits, experts)

    def split(self) -> tuple[SplitShape, PoolSizes]:
        """Returns what the pools share, and their sizes now. Any thread may ask."""
        experts = self.experts()[0] if self.experts else None
        windows, states = self.table.windows, self.table.states
        sizes = PoolSizes(
            kv=self.pages.size if self.plan.page_bytes else None,
            swa=windows.pages.size if windows else None,
            mamba=states.size if states else None,
            moe_cache=experts.size if experts else None,
        )
        return shape_of(self.plan, self.limits, experts), sizes


def _window_pages(plan: MemoryPlan) -> WindowPages | None:
    if plan.window is None:
        return None
    policy = WindowPolicy(
        window=plan.window.window,
        page_tokens=plan.page_tokens,
        interval_tokens=plan.window.interval_tokens,
    )
    return WindowPages(policy, PageAllocator(plan.window.pages))


def _states(config: EngineConfig, plan: MemoryPlan) -> RecurrentStates | None:
    if plan.states is None:
        return None
    return RecurrentStates(plan.states.states, config.num_slots, plan.states.interval_tokens)

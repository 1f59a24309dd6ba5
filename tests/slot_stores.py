"""Stores of saved slots for engines on the fake runner, and for models in files.

Example:
    store = fake_store(tmp_path, runner, plan)
    save = save_wish(store, 0, "a.slot")
    engine.transfer_slot(save)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.memory.planner import MemoryPlan
from engine.scheduling.wishes import Restore, Save
from engine.slots.fingerprint import Traits, WeightsDigest
from engine.slots.identity import Identity, ModelSource
from engine.slots.state_layout import StateLayout
from engine.slots.store import SlotStore, no_adapters
from engine.step import DeviceStore
from engine.types import AdapterInfo, PoolKind
from tests.fake_text import FakeTokenizer


class _FakeIdentity(Identity):
    """Hashes only when the test calls `run`."""

    def start(self) -> None:
        pass


def fake_identity(
    runner: DeviceStore, *, window: int | None = None, weights: str = "fake", is_ready: bool = True
) -> Identity:
    """The identity of a model that has no file; `weights` tells such models apart."""
    swa = None if window is None else runner.page_layout(PoolKind.SWA)
    layout = StateLayout.of(runner.page_layout(PoolKind.KV), swa, window or 0, runner.state_layout)
    identity = _FakeIdentity(
        Traits(layout, rope="none", tokenizer="fake", sampled="sample"),
        WeightsDigest(structure=weights, tokenizer="fake", sampled="sample"),
        ModelSource((), ()),
        model_name="Fake",
    )
    if is_ready:
        identity.run()
    return identity


def fake_store(
    root: Path,
    runner: DeviceStore,
    plan: MemoryPlan,
    adapters: Callable[[], Sequence[AdapterInfo]] = no_adapters,
    **identity: Any,
) -> SlotStore:
    """A store for an engine on this runner."""
    window = plan.window.window if plan.window else None
    return SlotStore(
        str(root),
        fake_identity(runner, window=window, **identity),
        vocab_size=FakeTokenizer().vocab_size,
        context_tokens=plan.slot_context_tokens,
        adapters=adapters,
    )


def save_wish(
    store: SlotStore, slot_id: int, filename: str, *, tenant: str = "", **changes: Any
) -> Save:
    """A wish to save, by a store whose identity is known."""
    order = store.save_order(filename, tenant, store.identity.fingerprint(0))
    return replace(Save(slot_id, order, tenant=tenant), **changes)


def restore_wish(
    store: SlotStore, slot_id: int, filename: str, *, tenant: str = "", **changes: Any
) -> Restore:
    """A wish to restore, by a store whose identity is known."""
    order = store.restore_order(filename, tenant, store.identity.fingerprint(0))
    return replace(Restore(slot_id, order), **changes)

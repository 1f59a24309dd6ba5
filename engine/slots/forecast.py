"""What `engine.slots.survivors.let_go` would let go, without doing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.checkpoint import Checkpoint
from engine.memory.pages import PageAllocator
from engine.memory.prefix_index import PageNode
from engine.slots.survivors import HeldState, unlisted_tokens
from engine.slots.table import Slot, SlotTable
from engine.step import DeviceSizes


@dataclass(frozen=True)
class Forecast:
    """What would be kept and dropped; `units` are the pages and states that would be copied."""

    kept: HeldState
    dropped: HeldState
    units: DeviceSizes


def forecast(table: SlotTable, pages: PageAllocator, sizes: DeviceSizes) -> Forecast:
    """Returns what new sizes would leave.

    Requests that run count as if they had ended now. A prefix that would move to the host counts as
    kept as long as the host's limit has room for it beside what is there.
    """
    rehearsal = _Rehearsal(table, pages)
    rehearsal.make_fit(sizes)
    now, kept = HeldState.of(table), rehearsal.kept()
    return Forecast(kept, now.without(kept), rehearsal.units)


class _Rehearsal:
    """The books of one table, copied as far as letting go changes them."""

    def __init__(self, table: SlotTable, pages: PageAllocator) -> None:
        self._table = table
        nodes = table.index.device_nodes()
        self._waiting = nodes
        self._gone: dict[PageNode, bool] = {}
        self._holders = Counter(node.page_id for node in nodes)
        for slot in table.slots:
            self._holders.update(slot.pages)
        self._slots = sorted(table.slots, key=lambda slot: (slot.last_used, -slot.slot_id))
        self._checkpoints = table.checkpoints.all()
        self._windows = Counter[int]()
        for checkpoint in self._checkpoints:
            self._windows.update(checkpoint.window_pages)
        for slot in table.slots:
            self._windows.update(_window_of(slot))
        self._host_use = table.index.host_tier.used

    @property
    def units(self) -> DeviceSizes:
        """What is left."""
        return DeviceSizes(_held(self._holders), _held(self._windows), self._num_states)

    def make_fit(self, sizes: DeviceSizes) -> None:
        """Lets go in the order of `let_go`."""
        while (missing := _held(self._holders) - sizes.kv) > 0:
            if not self._evict(missing) and not self._empty_one():
                break
        while self._table.windows and _held(self._windows) > sizes.swa:
            if self._checkpoints:
                self._drop(self._checkpoints[0])
            elif not self._empty_one():
                break
        while self._table.states and self._num_states > sizes.mamba:
            oldest = next((each for each in self._checkpoints if each.state_id), None)
            if oldest is None:
                break
            self._drop(oldest)

    def kept(self) -> HeldState:
        """Counts what is left."""
        lost = sum(node.num_tokens for node, is_kept in self._gone.items() if not is_kept)
        own = sum(unlisted_tokens(slot) for slot in self._slots)
        return HeldState(
            prefix_tokens=self._table.index.num_tokens - lost + own,
            slot_ids=tuple(sorted(slot.slot_id for slot in self._slots if slot.tokens)),
            snapshots=self._num_snapshots,
        )

    @property
    def _num_snapshots(self) -> int:
        return sum(bool(checkpoint.state_id) for checkpoint in self._checkpoints)

    @property
    def _num_states(self) -> int:
        return self._num_snapshots + len(self._table.slots) if self._table.states else 0

    def _evict(self, num_pages: int) -> int:
        chosen: dict[PageNode, None] = {}
        for node in self._waiting:
            if len(chosen) == num_pages:
                break
            children = (each for each in node.children.values() if not each.is_on_host)
            if self._holders[node.page_id] == 1 and all(
                each in self._gone or each in chosen for each in children
            ):
                chosen[node] = None
        for node in chosen:
            self._release([node.page_id])
            self._gone[node] = self._moves_to_host(node)
            if not self._gone[node]:
                for checkpoint in node.checkpoints:
                    self._drop(checkpoint)
        self._waiting = [node for node in self._waiting if node not in self._gone]
        return len(chosen)

    def _moves_to_host(self, node: PageNode) -> bool:
        tier = self._table.index.host_tier
        cost = tier.cost_of(node.key)
        if cost is None or not tier.allows(self._host_use + cost):
            return False
        self._host_use += cost
        return True

    def _empty_one(self) -> bool:
        slot = next((each for each in self._slots if each.pages), None)
        if slot is None:
            return False
        self._slots.remove(slot)
        self._release(slot.pages)
        self._windows.subtract(_window_of(slot))
        return True

    def _release(self, page_ids: Sequence[int]) -> None:
        self._holders.subtract(page_ids)

    def _drop(self, checkpoint: Checkpoint) -> None:
        if checkpoint in self._checkpoints:
            self._checkpoints.remove(checkpoint)
            self._windows.subtract(checkpoint.window_pages)


def _held(holders: Counter[int]) -> int:
    return sum(count > 0 for count in holders.values())


def _window_of(slot: Slot) -> list[int]:
    return [page_id for page_id in slot.window.page_ids if page_id]

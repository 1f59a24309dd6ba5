"""Whether a request that could start now had better wait for one that reads the same prompt. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from engine.adapters.effective import EffectiveSet
from engine.memory.prefix_index import PrefixRoot
from engine.scheduling.row import Arrival, Row
from engine.slots.prefixes import Reuse
from engine.slots.table import SlotTable, common_prefix
from engine.types import SlotState


def gains_by_waiting(
    arrival: Arrival,
    adapters: EffectiveSet,
    root: PrefixRoot,
    tokens: tuple[int, ...],
    found: Reuse,
    rows: Iterable[Row],
    table: SlotTable,
) -> bool:
    """Returns whether a prompt that is being read will soon hold more of this one than is held now.

    Prompts are read one after the other, so the wait costs nothing.
    """
    request = arrival.request
    if not request.cache_prompt:
        return False
    for row in rows:
        if row.state is not SlotState.PREFILL or row.home.root != root:
            continue
        shared = min(common_prefix(row.request.prompt, tokens), len(tokens) - 1)
        for limit in (adapters.prefix_limit, row.adapters.prefix_limit):
            shared = shared if limit is None else min(shared, limit)
        is_kin = request.group and row.request.group == request.group
        least = 1 if is_kin else table.page_tokens
        if shared - found.num_tokens >= least:
            return True
    return False

"""What requests may have of each other's tokens, and when one had better wait for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from engine.adapters.effective import EffectiveSet
from engine.memory.prefix_index import PrefixRoot
from engine.scheduling.row import Arrival, Row
from engine.slots.prefixes import Reuse
from engine.slots.table import Slot, SlotTable, common_prefix
from engine.types import SlotState


def reuse_limit(arrival: Arrival, adapters: EffectiveSet, slot: Slot) -> int | None:
    """Returns how many leading tokens a request may reuse; None for all.

    A request that goes on after a pre-emption must not take up what another one left behind a
    shift: it is not what it had itself.
    """
    limits = [adapters.prefix_limit, slot.marked_from if arrival.row else None]
    return min((limit for limit in limits if limit is not None), default=None)


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

    Its chunks are listed as they are read. Samples of one prompt wait for a single token, others
    for a page.
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
        is_sample = is_kin and row.request.prompt == request.prompt
        least = 1 if is_sample else table.page_tokens
        is_ahead = len(row.home.tokens) < shared  # what was read is listed, or is no use
        if is_ahead and shared - found.num_tokens >= least:
            return True
    return False

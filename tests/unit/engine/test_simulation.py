"""The engine survives random programs of commands, time and faults, seed by seed.

`SIM_SEEDS` sets how many seeds (nightly runs use tens of thousands) and `SIM_FIRST` the first one, so
that `SIM_FIRST=17 SIM_SEEDS=1` replays seed 17.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from engine.failpoints import Site
from engine.types import FinishReason
from tests.unit.engine.simulation import Simulation

NUM_SEEDS = int(os.environ.get("SIM_SEEDS", "150"))
FIRST_SEED = int(os.environ.get("SIM_FIRST", "0"))
NUM_COMMANDS = 300
# What one test runs; the tests of many seeds share the processors.
SEEDS_PER_TEST = 250
# With fewer seeds a rare branch may stay unseen, which says nothing.
SEEDS_THAT_SEE_ALL = 100

EVERY_BRANCH = {
    *(f"fired:{site.value}" for site in Site),
    *(
        f"finished:{reason.value}"
        for reason in FinishReason
        if reason not in (FinishReason.TIME, FinishReason.INDENT)
    ),
    "finished:pool_full",
    "failed:ENGINE_FAULT",
    "failed:DEADLINE",
    "fault:InjectedFault",
    "fault:MemoryError",
    "fault:NonFiniteLogits",
    "fault:PoolLost",
    "cancelled:queued",
    "cancelled:prefill",
    "cancelled:decode",
    "refused:QUEUE_FULL",
    "refused:DUPLICATE_REQUEST",
    "refused:CONTEXT_OVERFLOW",
    "refused:KV_PAGES_EXHAUSTED",
    "refused:TOKEN_NOT_IN_VOCAB",
    "refused:NO_SUCH_SLOT",
    "refused:NO_SUCH_ADAPTER",
    "refused:INVALID_FIELD",
    "refused:SHUTTING_DOWN",
    "erased",
    "erase:SLOT_BUSY",
    "erase:SLOT_CONTENT_NOT_FOUND",
    "reused",
    "reused:window",
    "reused:slot",
    "reused:index",
    "reused:host",
    "reused:state:slot",
    "reused:state:index",
    "state_gone",
    "shifted",
    "marked",
    "window_gone",
    "loaded",
    "load:again",
    "load:ADAPTER_EXISTS",
    "load:ADAPTER_ROOM",
    "scaled",
    "scales:NO_SUCH_ADAPTER",
    "unloaded",
    "fenced",
    "unload:ADAPTER_IN_USE",
    "adapted",
    "activated",
    "failed:NO_SUCH_ADAPTER",
    "failed:INVALID_FIELD",
    "preempted",
    "preempted:window",
    "evicted",
    "saved",
    "saved:nothing",
    "save:cancelled",
    "save:DISK_FULL",
    "save:ENGINE_FAULT",
    "save:SLOT_BUSY",
    "save:SLOT_CONTENT_NOT_FOUND",
    "save:SLOT_IO",
    "warmed",
    "restored",
    "restored:nothing",
    "restore:cancelled",
    "restore:DISK_FULL",
    "restore:ENGINE_FAULT",
    "restore:KV_PAGES_EXHAUSTED",
    "restore:SLOT_BUSY",
    "restore:SLOT_FILE_CORRUPT",
    "restore:SLOT_FILE_MISMATCH",
    "restore:SLOT_FILE_NOT_FOUND",
    "restore:SLOT_IO",
    "reused:restored",
    "autosaved",
    "rebuilt",
    "rebuilt:moe_cache",
    "rebuild:forecast",
    "rebuild:dropped",
    "rebuild:cancelled",
    "rebuild:POOLS_BUSY",
    "rebuild:NO_SUCH_POOL",
    "rebuild:BELOW_FLOOR",
    "rebuild:TOO_LARGE",
    "rebuild:REBUILD_ROLLED_BACK",
}

_END = FIRST_SEED + NUM_SEEDS

# What hangs is a seed, not the whole.
pytestmark = pytest.mark.timeout(300 + 2 * SEEDS_PER_TEST)


@pytest.mark.parametrize("first", range(FIRST_SEED, _END, SEEDS_PER_TEST))
def test_every_seed_keeps_every_invariant(first: int) -> None:
    seeds = range(first, min(first + SEEDS_PER_TEST, _END))
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            simulation.run(NUM_COMMANDS)
        except BaseException as error:
            error.add_note(f"replay: SIM_FIRST={seed} SIM_SEEDS=1 pytest {__file__}")
            raise
        seen += simulation.seen
    if len(seeds) >= SEEDS_THAT_SEE_ALL:
        assert set(seen) >= EVERY_BRANCH, f"never happened: {sorted(EVERY_BRANCH - set(seen))}"


def test_a_seed_replays_exactly() -> None:
    runs = [Simulation(FIRST_SEED) for _ in range(2)]
    for simulation in runs:
        simulation.run(NUM_COMMANDS)
    assert repr(runs[0].judge.lives) == repr(runs[1].judge.lives)
    assert runs[0].seen == runs[1].seen

"""What goes on beside a transfer, or ends it: other requests, lost pools, a rebuild, the stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    EngineError,
    EngineFault,
    ShuttingDown,
)
from engine.memory.errors import PoolsBusy
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildState, RebuildWish
from engine.step import PoolLost
from engine.types import SlotState
from tests.slot_stores import restore_wish, save_wish
from tests.unit.engine.drive import A, B, solo
from tests.unit.engine.scheduling.saving import NAME, Transfers, ask_in, some_prompt


def test_a_stop_waits_for_a_save_within_its_time(tmp_path: Path):
    it = Transfers(tmp_path, context_tokens=1024, kv_pages=300)
    it.run(ask_in("a", some_prompt(900)))
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.drive.steps()
    it.engine.stop(grace_s=60.0)
    assert wish.done.result(0).tokens == 904
    with pytest.raises(ShuttingDown):
        it.engine.transfer_slot(save_wish(it.store, 0, NAME))


def test_a_stop_without_time_gives_transfers_up(tmp_path: Path):
    it = Transfers(tmp_path)
    it.engine.submit(ask_in("a", some_prompt(20), max_tokens=40))
    it.drive.steps(3)
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.engine.stop()
    with pytest.raises(ShuttingDown):
        wish.done.result(0)


@pytest.mark.parametrize("restores", [False, True])
def test_a_rebuild_waits_for_a_transfer_and_the_slot_goes_on_as_ever(
    tmp_path: Path, restores: bool
):
    it = Transfers(tmp_path)
    prompt = some_prompt(50)
    answer = it.run(ask_in("a", prompt))
    it.save(0)
    wish: Any = (restore_wish if restores else save_wish)(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.drive.steps()
    assert it.engine.snapshot().slots[0].state is SlotState.TRANSFER
    busy = it.engine.rebuild(RebuildWish(PoolSizes(kv=40), "at-once"))
    rebuilding = it.engine.rebuild(RebuildWish(PoolSizes(kv=40), "waits", drain_s=60.0))
    it.drive.steps()
    refused = busy.exception(0)
    assert isinstance(refused, PoolsBusy)
    assert refused.metadata() == {"cause": "transfers", "activeRequests": "0"}
    it.drive.on_the_side()
    it.wait(wish.done)
    it.settle()
    assert rebuilding.result(0).current.kv == 40
    assert it.engine.rebuilds.state is RebuildState.SERVING
    longer = (*prompt, *answer[:-1], B)
    assert it.run(ask_in("b", longer)) == solo(longer, 5)
    assert it.drive.started("b").cached_tokens == len(longer) - 1


@pytest.mark.parametrize("window", [None, 8])
def test_nobody_reads_what_is_written_after_a_prompt_was_given_up(
    tmp_path: Path, window: int | None
):
    """The prompt went on in the slot's last page; what comes back goes on there differently."""
    it = Transfers(tmp_path, window=window)
    it.run(ask_in("a", some_prompt(30), max_tokens=1))
    (tmp_path / NAME).mkdir()
    given_up = (*some_prompt(30), B, A, B)
    wish = it.warm(ask_in("w", given_up))
    with pytest.raises(EngineError, match="errno"):
        it.wait(wish.done)
    other = (*some_prompt(30), A, A, A)
    assert it.run(ask_in("b", other)) == solo(other, 5, window)
    assert it.drive.started("b").cached_tokens == 30
    assert it.run(ask_in("c", (*given_up, B), 1)) == solo((*given_up, B), 5, window)


def test_a_fault_while_room_is_made_leaves_no_slot_cut(tmp_path: Path):
    """Its last page is listed whole: who goes on in it would change what others read."""
    it = Transfers(tmp_path, kv_pages=16, host_cache_bytes=None)
    it.run(ask_in("a", some_prompt(16), max_tokens=1))
    it.run(ask_in("b", some_prompt(40, 3), 1, max_tokens=1))
    it.drive.runner.fail_transfer_with = MemoryError("full")
    it.run(ask_in("c", (*some_prompt(14), *[A + 25] * 16), max_tokens=1))
    assert isinstance(it.drive.error("c"), EngineFault)
    longer = (*some_prompt(14), A + 25, B, B)
    assert it.run(ask_in("d", longer)) == solo(longer, 5)
    whole = (*some_prompt(16), B)
    assert it.run(ask_in("e", whole, 1)) == solo(whole, 5)


def test_a_lone_request_waits_for_the_pages_of_a_transfer(tmp_path: Path):
    it = Transfers(tmp_path, kv_pages=16)
    it.run(ask_in("a", some_prompt(40)))
    wish = save_wish(it.store, 0, NAME)
    it.engine.transfer_slot(wish)
    it.engine.submit(ask_in("b", some_prompt(16, 3), 1, max_tokens=40))
    it.wait(wish.done)
    it.drive.rest()
    assert it.drive.tokens("b") == solo(some_prompt(16, 3), 40)


def test_pools_that_are_lost_while_room_is_made_for_a_file_are_empty(tmp_path: Path):
    first = Transfers(tmp_path)
    first.run(ask_in("a", some_prompt(50)))
    first.save(0)
    it = Transfers(tmp_path, kv_pages=16, host_cache_bytes=None)
    it.run(ask_in("a", some_prompt(40, 1)))
    it.drive.runner.fail_transfer_with = PoolLost("gone")
    with pytest.raises(EngineFault):
        it.restore(1)
    it.drive.rest()
    assert it.held(0) == 0
    longer = (*some_prompt(40, 1), B)
    assert it.run(ask_in("b", longer)) == solo(longer, 5)
    assert it.drive.started("b").cached_tokens == 0

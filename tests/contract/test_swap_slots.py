"""With autosave a change of the model is to slots what a restart is: they come back with theirs."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvarts.v1 import slot_pb2

from engine.errors import ModelFileError
from tests.contract.serving import GenerateRequest, Serving, StepGate, failure, gated_runner
from tests.contract.swaps import (
    IN_PLACE,
    NEW,
    OLD,
    all_replies,
    load,
    make_loader,
    retired,
    said,
    swapping,
)
from tests.loaders import FakeLoader
from tests.waiting import until


@pytest.fixture(name="loader")
def _loader(tmp_path: Path) -> FakeLoader:
    loader = make_loader(tmp_path)
    loader.slot_folder = tmp_path / "slots"
    loader.slot_folder.mkdir()
    return loader


def auto(loader: FakeLoader) -> dict[str, Any]:
    weights = (loader.folder / OLD).read_text()
    return {
        "slot_save_path": str(loader.slot_folder),
        "slot_autosave": True,
        "identity": {"weights": weights},
    }


async def held(it: Serving) -> dict[int, int]:
    slots = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
    return {slot.id: slot.held_tokens for slot in slots if slot.held_tokens}


async def restored(it: Serving, expected: dict[int, int]) -> None:
    await until(partial(held, it), lambda tokens: tokens == expected)


async def cached(it: Serving, text: str) -> int:
    replies = await it.collect(GenerateRequest(text=text, max_tokens=1))
    return replies[-1].finished.cached_tokens


@pytest.mark.parametrize("replace_first", [True, False])
async def test_slots_are_saved_before_the_old_model_goes_and_come_back_with_it(
    loader: FakeLoader, replace_first: bool
) -> None:
    async with swapping(loader, **auto(loader)) as it:
        await said(it)
        mine = await held(it)
        assert len(mine) == 1
        await load(it, NEW, replace_first=replace_first)
        await retired(loader, OLD)
        assert not await held(it)
        # Another prompt of the other model, whose slots have files of their own.
        await it.collect(GenerateRequest(text="abcdef", max_tokens=2))
        other = await held(it)
        assert other != mine
        await load(it, OLD, replace_first=replace_first)
        await restored(it, mine)
        assert await cached(it, "ab") > 0
        await retired(loader, OLD, NEW)
        await load(it, NEW, replace_first=replace_first)
        await restored(it, other)


async def test_slots_come_back_when_the_new_model_cannot_be_loaded(loader: FakeLoader) -> None:
    loader.fails = {("load", NEW): [ModelFileError(NEW, "is gone")]}
    async with swapping(loader, **auto(loader)) as it:
        await said(it)
        mine = await held(it)
        assert (await failure(load(it, NEW, replace_first=True))).reason == "MODEL_ROLLED_BACK"
        await restored(it, mine)


async def test_a_stop_amid_a_change_saves_the_slots_of_the_model_that_was_served(
    loader: FakeLoader,
) -> None:
    gate = StepGate()
    async with swapping(loader, runner=gated_runner(gate), **auto(loader)) as it:
        running = asyncio.create_task(said(it, 20))
        await gate.arrival()
        changing = asyncio.create_task(all_replies(it, IN_PLACE))
        gate.open()
        await running
        await asyncio.gather(changing, it.server.stop(30.0), return_exceptions=True)
    assert loader.slot_folder is not None
    assert [path for path in loader.slot_folder.iterdir() if path.name.startswith(".autosave-")]

"""LoadModel: another model is served, or the old one still is, and a client can tell which."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from gguf import GGMLQuantizationType as Type
from kvarts.v1 import (
    common_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
)

from engine.adapters.errors import AdapterMismatch
from engine.errors import ModelFileError, UnsupportedModel
from tests.adapters import TinyAdapter, write_adapter
from tests.contract.serving import (
    CONFIG,
    GenerateRequest,
    Serving,
    StepGate,
    failure,
    gated_runner,
    read_failure,
    serving,
)
from tests.contract.swaps import (
    LETTERS,
    NEW,
    OLD,
    A,
    B,
    LoadModelRequest,
    all_replies,
    load,
    make_loader,
    refused,
    retired,
    said,
    served,
    swapping,
    until_loading,
    until_unready,
)
from tests.contract.test_metrics import scrape
from tests.fakes import FakeClock
from tests.loaders import TIGHT, FakeLoader
from tests.waiting import until, until_so

SAVE = slot_pb2.SaveSlotRequest(slot_id=0, filename="a")
SHAPES = {"blk.0.attn_q.weight": (4, 4)}


@pytest.fixture(name="loader")
def _loader(tmp_path: Path) -> FakeLoader:
    return make_loader(tmp_path)


@pytest.mark.parametrize("replace_first", [False, True])
async def test_another_model_is_served(loader: FakeLoader, replace_first: bool) -> None:
    async with swapping(loader) as it:
        assert await said(it) == LETTERS[A] * 4
        loaded = await load(it, replace_first=replace_first)
        assert (loaded.model.id, await served(it)) == (NEW, NEW)
        assert loaded.plan.side_by_side is not replace_first
        assert await said(it) == LETTERS[B] * 4
        await retired(loader, OLD)
        assert await it.status() == 1
        assert loader.num_released >= 1


@pytest.mark.parametrize("replace_first", [False, True])
async def test_running_requests_finish_on_the_model_that_they_began_on(
    loader: FakeLoader, replace_first: bool
) -> None:
    gate = StepGate()
    async with swapping(loader, runner=gated_runner(gate)) as it:
        running = [asyncio.create_task(said(it, 20)) for _ in range(6)]
        for _ in running:
            await it.commanded("submit")
        await gate.arrival()
        changing = asyncio.create_task(load(it, replace_first=replace_first))
        if replace_first:
            await until_unready(it)
            failed = await failure(it.slots.SaveSlot(SAVE))
            assert (failed.reason, failed.retry_s) == ("MODEL_LOADING", 1.0)
            assert loader.orders == []
        else:
            assert (await changing).calls_on_old_model == 6
            assert await said(it) == LETTERS[B] * 4
            assert loader.closed == []
        gate.open()
        assert await asyncio.gather(*running) == [LETTERS[A] * 20] * 6
        await changing
        await retired(loader, OLD)
        assert await said(it) == LETTERS[B] * 4
        counters = await scrape(it)
        done = 'kvarts_generations_total{outcome="finished"}'
        assert counters[done] == (7 if replace_first else 8)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ModelFileError(NEW, "cut off"), grpc.StatusCode.INVALID_ARGUMENT, "MODEL_FILE_INVALID"),
        (UnsupportedModel(NEW, "rwkv"), grpc.StatusCode.UNIMPLEMENTED, "MODEL_NOT_SUPPORTED"),
        (
            AdapterMismatch("a", "t", "(4, 4)", "(2, 2)"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "ADAPTER_MISMATCH",
        ),
        (MemoryError(), grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
@pytest.mark.parametrize("what", ["check", "load"])
async def test_a_wrong_model_leaves_the_old_one_in_force(
    loader: FakeLoader,
    what: str,
    error: Exception,
    code: grpc.StatusCode,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader.fails = {(what, NEW): [error]}
    async with swapping(loader) as it:
        failed = await refused(it)
        assert (failed.code, failed.reason) == (code, reason)
        assert (await served(it), await said(it)) == (OLD, LETTERS[A] * 4)
        counters = await scrape(it)
        if reason != "INTERNAL":
            assert counters[f'kvarts_model_swaps_total{{result="{reason}"}}'] == 1
            assert any(f"model {NEW!r} is not served" in text for text in caplog.messages)
        # Nothing is left of it: the next one goes well.
        await load(it)
        assert (await scrape(it))['kvarts_model_swaps_total{result="ok"}'] == 1


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "INVALID_FIELD"),
        ("a\0b", "INVALID_FIELD"),
        ("a" * 4097, "INVALID_FIELD"),
        ("gone.gguf", "MODEL_FILE_NOT_FOUND"),
        (".", "PATH_OUTSIDE_ROOT"),
        ("../models/new.gguf", "PATH_OUTSIDE_ROOT"),
        ("/etc/passwd", "PATH_OUTSIDE_ROOT"),
        ("link.gguf", "PATH_OUTSIDE_ROOT"),
        ("folder", "MODEL_FILE_NOT_FOUND"),
        ("text.gguf", "MODEL_FILE_INVALID"),
    ],
)
async def test_paths(loader: FakeLoader, path: str, reason: str) -> None:
    (loader.folder / "folder").mkdir()
    (loader.folder / "text.gguf").write_text("a text")
    (loader.folder / "link.gguf").symlink_to("/etc/passwd")
    async with swapping(loader) as it:
        assert (await refused(it, path)).reason == reason
        assert await served(it) == OLD


async def test_a_server_without_a_folder_changes_nothing() -> None:
    async with serving() as it:
        assert (await refused(it)).reason == "NOT_SUPPORTED"
        info = await it.model.GetServerInfo(model_pb2.GetServerInfoRequest())
        assert not info.info.features.model_loading


async def test_the_planner_refuses_what_can_never_fit(loader: FakeLoader) -> None:
    loader.plan = replace(TIGHT, least_bytes=101)
    async with swapping(loader) as it:
        failed = await refused(it)
    assert (failed.code, failed.reason) == (grpc.StatusCode.OUT_OF_RANGE, "MODEL_TOO_LARGE")
    assert failed.metadata == {"path": NEW, "neededBytes": "101", "limitBytes": "100"}


async def test_validating_loads_nothing(loader: FakeLoader) -> None:
    async with swapping(loader) as it:
        loaded = await load(it, validate_only=True)
        assert (loaded.model.id, loaded.plan.side_by_side) == (OLD, True)
        assert (loaded.plan.needed_bytes, loaded.plan.available_bytes) == (10, 50)
        assert loader.orders == []
        loader.plan = TIGHT
        assert not (await load(it, validate_only=True)).plan.side_by_side


async def test_a_failure_after_the_switch_began_brings_the_old_model_back(
    loader: FakeLoader,
) -> None:
    loader.plan = TIGHT
    loader.fails = {("load", NEW): [RuntimeError("the device is full")]}
    async with swapping(loader) as it:
        await said(it)
        failed = await refused(it)
        assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "MODEL_ROLLED_BACK")
        assert failed.metadata == {"path": NEW, "detail": "it failed (RuntimeError)"}
        assert (await served(it), await said(it)) == (OLD, LETTERS[A] * 4)
        assert await it.status() == 1
        counters = await scrape(it)
        assert counters['kvarts_model_swaps_total{result="MODEL_ROLLED_BACK"}'] == 1
        assert counters['kvarts_generations_total{outcome="finished"}'] == 2
        # As it was, its pools too.
        assert loader.orders[1].sizes == loader.engines[0].pools.split()[1]


async def test_a_model_that_cannot_come_back_ends_the_service(loader: FakeLoader) -> None:
    loader.plan = TIGHT
    loader.fails = {("load", name): [ModelFileError(name, "is gone")] for name in (OLD, NEW)}
    async with swapping(loader) as it:
        failed = await refused(it)
        assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "MODEL_LOST")
        assert (await it.status(), await it.status("")) == (2, 2)
        assert (await failure(it.collect(GenerateRequest(text="a")))).reason == "MODEL_LOADING"


async def test_a_drain_that_runs_out_leaves_all_as_it_was(loader: FakeLoader) -> None:
    gate = StepGate()
    async with swapping(loader, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(said(it, 20))
        await gate.arrival()
        how = LoadModelRequest(path=NEW, replace_first=True)
        how.drain_timeout.FromMilliseconds(1)
        failed = await failure(all_replies(it, how))
        assert (failed.code, failed.reason) == (grpc.StatusCode.ABORTED, "MODEL_IN_USE")
        assert failed.metadata == {"activeRequests": "1"}
        gate.open()
        assert await running == LETTERS[A] * 20
        assert (await served(it), await it.status()) == (OLD, 1)


async def test_who_goes_away_while_it_loads_stops_it(loader: FakeLoader) -> None:
    loader.gate = threading.Event()
    async with swapping(loader) as it:
        call = it.model.LoadModel(LoadModelRequest(path=NEW))
        await until_loading(loader)
        # One at a time, also while the first one ends.
        busy = await refused(it)
        assert (busy.code, busy.reason, busy.retry_s) == (
            grpc.StatusCode.ABORTED,
            "MODEL_SWAP_BUSY",
            1.0,
        )
        call.cancel()
        loader.gate.set()
        await until(partial(_is_busy, it), lambda is_busy: not is_busy)
        assert await served(it) == OLD
        # What was loaded in that moment is let go.
        assert loader.closed == [NEW] * len(loader.engines)
        counters = await scrape(it)
        assert counters['kvarts_model_swaps_total{result="cancelled"}'] == 1


async def _is_busy(it: Serving) -> bool:
    try:
        await load(it, OLD, validate_only=True)
    except grpc.aio.AioRpcError as error:
        return read_failure(error).reason == "MODEL_SWAP_BUSY"
    return False


async def test_who_goes_away_after_the_old_model_gets_the_new_one(loader: FakeLoader) -> None:
    loader.plan, loader.gate = TIGHT, threading.Event()
    async with swapping(loader) as it:
        call = it.model.LoadModel(LoadModelRequest(path=NEW))
        await until_loading(loader)
        call.cancel()
        loader.gate.set()
        await until(it.status, lambda status: status == 1)
        assert await said(it) == LETTERS[B] * 4


@pytest.mark.parametrize("is_tight", [False, True])
async def test_a_stop_does_not_wait_for_a_load(loader: FakeLoader, is_tight: bool) -> None:
    loader.plan = TIGHT if is_tight else loader.plan
    loader.gate = threading.Event()
    async with swapping(loader, stop_s=1.0) as it:
        call = it.model.LoadModel(LoadModelRequest(path=NEW))
        await until_loading(loader)
        began_s = asyncio.get_running_loop().time()
        await it.server.stop(1.0)
        assert asyncio.get_running_loop().time() - began_s < 20
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        loader.gate.set()


async def test_the_same_file_again(loader: FakeLoader) -> None:
    loader.write(OLD, A)
    async with swapping(loader) as it:
        loader.write(OLD, B)
        assert (await load(it, OLD)).model.id == OLD
        assert await said(it) == LETTERS[B] * 4


async def test_adapters_keep_their_ids_and_scales_also_after_sleep(
    loader: FakeLoader, tmp_path: Path
) -> None:
    clock = FakeClock()
    folder = tmp_path / "adapters"
    folder.mkdir()
    loader.config = replace(CONFIG, sleep_idle_s=0.01)
    async with swapping(loader, adapter_dir=str(folder), config=loader.config, clock=clock) as it:
        for name in "abc":
            write_adapter(folder / f"{name}.gguf", _adapter(), SHAPES, tuple(SHAPES))
            request = lora_pb2.LoadAdapterRequest(name=name, path=f"{name}.gguf", scale=0.5)
            await it.lora.LoadAdapter(request)
            if name == "a":
                await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=0))
        scales = [
            common_pb2.AdapterScale(adapter_id=1, scale=0.25),
            common_pb2.AdapterScale(adapter_id=2, scale=3),
        ]
        set_ = lora_pb2.SetAdapterScalesRequest(scales=common_pb2.AdapterScales(scales=scales))
        before = (await it.lora.SetAdapterScales(set_)).adapters
        clock.advance(1)
        await until_so(lambda: it.engine.snapshot().is_asleep)
        await load(it)
        after = await it.lora.ListAdapters(lora_pb2.ListAdaptersRequest())
        assert [(a.id, a.name, a.path, a.scale) for a in after.adapters] == [
            (a.id, a.name, a.path, a.scale) for a in before
        ]
        assert [a.id for a in after.adapters] == [1, 2]
        assert [one.source for one in loader.orders[0].kept.adapters] == [
            folder / "b.gguf",
            folder / "c.gguf",
        ]
        await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=1))
        again = lora_pb2.LoadAdapterRequest(name="d", path="b.gguf")
        assert (await it.lora.LoadAdapter(again)).adapter.id == 3


def _adapter() -> TinyAdapter:
    return TinyAdapter(rank=2, ggml_type=Type.F32, architecture="fake")


async def test_changes_that_it_takes_over_wait_for_it(loader: FakeLoader, tmp_path: Path) -> None:
    loader.gate = threading.Event()
    async with swapping(loader, adapter_dir=str(tmp_path)) as it:
        changing = asyncio.create_task(load(it))
        await until_loading(loader)
        none = lora_pb2.SetAdapterScalesRequest(scales=common_pb2.AdapterScales())
        sizes = rebuild_pb2.RebuildRequest(target=rebuild_pb2.PoolSizes(kv_pages=100))
        for call in (it.lora.SetAdapterScales(none), it.rebuild.Rebuild(sizes)):
            assert (await failure(call)).reason == "MODEL_SWAP_BUSY"
        assert await said(it) == LETTERS[A] * 4
        loader.gate.set()
        await changing
        await it.lora.SetAdapterScales(none)


async def test_what_the_old_model_computed_is_never_matched(
    loader: FakeLoader, tmp_path: Path
) -> None:
    """Neither a slot, nor a prefix, nor a file; a swap back finds the file again."""
    slots = tmp_path / "slots"
    slots.mkdir()
    loader.slot_folder = slots
    text = "the same long prompt for both of them, more than a page"
    ask = GenerateRequest(text=text, max_tokens=1, cache_prompt=True, slot_id=0)
    identity = {"weights": str(A)}
    async with swapping(loader, slot_save_path=str(slots), identity=identity) as it:

        async def cached() -> int:
            return (await it.collect(ask))[0].started.cached_tokens

        assert (await cached(), await cached() > 0) == (0, True)
        await it.slots.SaveSlot(slot_pb2.SaveSlotRequest(slot_id=0, filename="a"))
        await load(it)
        shown = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
        assert [slot.held_tokens for slot in shown] == [0] * CONFIG.num_slots
        assert await cached() == 0
        restore = slot_pb2.RestoreSlotRequest(slot_id=1, filename="a")
        assert (await failure(it.slots.RestoreSlot(restore))).reason == "SLOT_FILE_MISMATCH"
        await load(it, OLD)
        assert await cached() == 0
        assert (await it.slots.RestoreSlot(restore)).restored_tokens > 0


async def test_who_watches_is_told_of_every_model(loader: FakeLoader) -> None:
    async with swapping(loader) as it:
        told = it.model.WatchModel(model_pb2.WatchModelRequest())
        first = await told.read()
        await load(it)
        second = await told.read()
        loader.gate = threading.Event()
        changing = asyncio.create_task(load(it, OLD, replace_first=True))
        third = await told.read()
        # Who comes while nothing is served is told so too.
        late = it.model.WatchModel(model_pb2.WatchModelRequest())
        assert await late.read() == third
        loader.gate.set()
        await changing
        fourth = await told.read()
        assert [
            (one.tenure, one.model_id, one.changing) for one in (first, second, third, fourth)
        ] == [
            (1, OLD, False),
            (2, NEW, False),
            (2, NEW, True),
            (3, OLD, False),
        ]
        assert await late.read() == fourth


async def test_twenty_changes_leave_no_thread_and_no_count_behind(loader: FakeLoader) -> None:
    async with swapping(loader) as it:
        await load(it)
        await retired(loader, OLD)
        before = threading.active_count()
        for number in range(20):
            name = OLD if number % 2 == 0 else NEW
            gone = NEW if number % 2 == 0 else OLD
            loader.closed = []
            await load(it, name, replace_first=number % 3 == 0)
            await said(it, 1)
            await retired(loader, gone)
        assert threading.active_count() <= before + 1
        counters = await scrape(it)
        assert counters['kvarts_generations_total{outcome="finished"}'] == 20
        assert counters['kvarts_model_swaps_total{result="ok"}'] == 21


async def test_progress_is_told(loader: FakeLoader) -> None:
    async with swapping(loader) as it:
        replies = [one async for one in it.model.LoadModel(LoadModelRequest(path=NEW))]
    stages = [(one.progress.stage, one.progress.done) for one in replies[:-1]]
    assert stages == [
        (model_pb2.LOAD_STAGE_CHECK, 0),
        (model_pb2.LOAD_STAGE_WEIGHTS, 0),
        (model_pb2.LOAD_STAGE_WEIGHTS, 100),
    ]

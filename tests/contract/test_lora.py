"""LoraService over the wire: every row of the error table, and what a request gets of adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from kvarts.v1 import common_pb2, lora_pb2, slot_pb2

from tests.adapters import TinyAdapter, write_adapter
from tests.contract.serving import (
    GenerateRequest,
    SamplingParams,
    Serving,
    StepGate,
    failure,
    gated_runner,
    serving,
)
from tests.ggufs import write_gguf

Code = grpc.StatusCode
WEIGHT = "blk.0.attn_q.weight"
SHAPES = {WEIGHT: (4, 4)}


def write(folder: Path, name: str, **changes: Any) -> Path:
    adapter = replace(TinyAdapter(architecture="fake", rank=2), **changes)
    return write_adapter(folder / f"{name}.gguf", adapter, SHAPES, (WEIGHT,))


@asynccontextmanager
async def with_folder(folder: Path, num_adapters: int = 2, **more: Any) -> AsyncGenerator[Serving]:
    for seed, name in enumerate("abc"):
        write(folder, name, seed=seed)
    async with serving(adapter_dir=str(folder), num_adapters=num_adapters, **more) as it:
        yield it


async def load(it: Serving, name: str, path: str = "", **more: Any) -> lora_pb2.Adapter:
    request = lora_pb2.LoadAdapterRequest(name=name, path=path or f"{name}.gguf", **more)
    return (await it.lora.LoadAdapter(request)).adapter


async def listed(it: Serving) -> lora_pb2.ListAdaptersResponse:
    return await it.lora.ListAdapters(lora_pb2.ListAdaptersRequest())


def scales(*entries: tuple[int, float]) -> common_pb2.AdapterScales:
    named = [common_pb2.AdapterScale(adapter_id=one, scale=scale) for one, scale in entries]
    return common_pb2.AdapterScales(scales=named)


def text_of(responses: Any) -> str:
    return "".join(response.chunk.text for response in responses)


async def test_a_loaded_adapter_is_listed_with_its_facts(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as it:
        adapter = await load(it, "a", scale=0.5)
        (found,) = (reply := await listed(it)).adapters
        metrics = it.engine.snapshot().adapters
    assert found == adapter
    assert (found.id, found.name, found.path, found.rank) == (0, "a", "a.gguf", 2)
    assert (found.alpha, found.scale, found.size_bytes) == (8.0, 0.5, 2 * 2 * 4 * 4)
    assert list(found.targets) == [WEIGHT]
    assert len(found.content_hash) == 64
    assert (reply.max_adapters, reply.max_rank) == (2, 4)
    # 8 ranks, which is what programs are compiled for, of 4 + 4 float32, an entry and a factor.
    assert reply.place_bytes == 8 * 8 * 4 + 8
    assert (reply.bank_bytes, reply.free_bytes) == (2 * reply.place_bytes, reply.place_bytes)
    assert len(metrics) == 1


async def test_a_server_without_room_lists_nothing_and_takes_nothing(tmp_path: Path) -> None:
    async with serving() as it:
        assert await listed(it) == lora_pb2.ListAdaptersResponse()
        request = lora_pb2.LoadAdapterRequest(name="a", path="a.gguf")
        no_folder = await failure(it.lora.LoadAdapter(request))
    async with serving(adapter_dir=str(tmp_path)) as it:
        no_room = await failure(it.lora.LoadAdapter(request))
    for failed in (no_folder, no_room):
        assert (failed.code, failed.reason) == (Code.UNIMPLEMENTED, "NOT_SUPPORTED")


async def test_a_request_runs_under_its_own_set_or_the_servers(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as it:
        plain = await it.collect(GenerateRequest(text="x", max_tokens=4))
        await load(it, "a")
        server = await it.collect(GenerateRequest(text="x", max_tokens=4))
        off = await it.collect(GenerateRequest(text="x", max_tokens=4, adapters=scales()))
        half = await it.collect(GenerateRequest(text="x", max_tokens=4, adapters=scales((0, 0.5))))
    assert text_of(off) == text_of(plain) != text_of(server)
    assert text_of(half) not in (text_of(server), text_of(plain))
    assert list(server[0].started.adapters.scales) == list(scales((0, 1.0)).scales)
    assert list(half[0].started.adapters.scales) == list(scales((0, 0.5)).scales)
    assert not off[0].started.adapters.scales


async def test_scales_replace_the_whole_set(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as it:
        await load(it, "a")
        await load(it, "b")
        request = lora_pb2.SetAdapterScalesRequest(scales=scales((1, -2.0)))
        reply = await it.lora.SetAdapterScales(request)
        assert [one.scale for one in reply.adapters] == [0.0, -2.0]
        assert list((await listed(it)).adapters) == list(reply.adapters)
        started = (await it.collect(GenerateRequest(text="x", max_tokens=1)))[0].started
    assert list(started.adapters.scales) == list(scales((1, -2.0)).scales)


async def test_a_running_request_keeps_its_set(tmp_path: Path) -> None:
    gate = StepGate()
    async with with_folder(tmp_path, runner=gated_runner(gate)) as it:
        await load(it, "a")
        request = GenerateRequest(text="x", max_tokens=6, ignore_eos=True)
        running = asyncio.ensure_future(it.collect(request))
        await gate.arrival()
        change = lora_pb2.SetAdapterScalesRequest(scales=scales())
        changing = asyncio.ensure_future(it.lora.SetAdapterScales(change))
        gate.open()
        await changing
        kept = await running
        alone = await it.collect(
            GenerateRequest(text="x", max_tokens=6, ignore_eos=True, adapters=scales((0, 1.0)))
        )
    assert text_of(kept) == text_of(alone)


async def test_unloading_waits_for_users_within_the_deadline(tmp_path: Path) -> None:
    gate = StepGate()
    async with with_folder(tmp_path, runner=gated_runner(gate)) as it:
        await load(it, "a")
        running = asyncio.ensure_future(it.collect(GenerateRequest(text="x", max_tokens=3)))
        await gate.arrival()
        unload = lora_pb2.UnloadAdapterRequest(adapter_id=0)
        late = asyncio.ensure_future(failure(it.lora.UnloadAdapter(unload, timeout=0.4)))
        at_once = lora_pb2.UnloadAdapterRequest(adapter_id=0, fail_if_busy=True)
        busy = asyncio.ensure_future(failure(it.lora.UnloadAdapter(at_once)))
        in_use = await late
        patient = asyncio.ensure_future(it.lora.UnloadAdapter(unload))
        gate.open()
        assert (await patient).freed_bytes == 264
        await running
        refused = await busy
        assert not (await listed(it)).adapters
        again = await failure(it.lora.UnloadAdapter(unload))
    for failed in (in_use, refused):
        assert (failed.code, failed.reason) == (Code.ABORTED, "ADAPTER_IN_USE")
        assert failed.metadata == {"adapterId": "0", "activeRequests": "1"}
        assert failed.retry_s is not None
    assert (again.code, again.reason) == (Code.NOT_FOUND, "NO_SUCH_ADAPTER")


async def test_who_comes_while_an_unload_waits_finds_the_adapter_gone(tmp_path: Path) -> None:
    """Else a stream of users could hold an unload up for ever."""
    gate = StepGate()
    async with with_folder(tmp_path, runner=gated_runner(gate)) as it:
        await load(it, "a")
        request = GenerateRequest(text="x", max_tokens=100, ignore_eos=True)
        running = asyncio.ensure_future(it.collect(request))
        await gate.arrival()
        wish = lora_pb2.UnloadAdapterRequest(adapter_id=0)
        unload = asyncio.ensure_future(it.lora.UnloadAdapter(wish))
        while not (await listed(it)).adapters[0].is_unloading:
            gate.step()
            await gate.arrival()
        server = asyncio.ensure_future(it.collect(GenerateRequest(text="y", max_tokens=3)))
        named = GenerateRequest(text="z", max_tokens=3, adapters=scales((0, 1.0)))
        late = asyncio.ensure_future(failure(it.collect(named)))
        gate.open()
        await unload
        first, second = await running, await server
        refused = await late
    assert list(first[0].started.adapters.scales) == list(scales((0, 1.0)).scales)
    assert not second[0].started.adapters.scales
    assert (refused.code, refused.reason) == (Code.NOT_FOUND, "NO_SUCH_ADAPTER")


async def test_a_name_is_one_content_and_ids_are_new(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as it:
        first = await load(it, "a")
        assert await load(it, "a") == first
        taken = await failure(load(it, "a", "b.gguf"))
        await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=0))
        assert (await load(it, "a", "b.gguf")).id == 1
    assert (taken.code, taken.reason) == (Code.ALREADY_EXISTS, "ADAPTER_EXISTS")
    assert taken.metadata == {"name": "a", "adapterId": "0"}


async def test_no_room(tmp_path: Path) -> None:
    """The arithmetic comes before the file: one that cannot be read is refused for the same."""
    async with with_folder(tmp_path, num_adapters=1) as it:
        await load(it, "a")
        (tmp_path / "b.gguf").unlink()
        failed = await failure(load(it, "b"))
        assert (reply := await listed(it)).free_bytes == 0
        again = await load(it, "a")
        await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=0))
        assert (await listed(it)).free_bytes == reply.place_bytes
        assert (await load(it, "c")).id == 1
    assert list(reply.adapters) == [again]
    assert (failed.code, failed.reason) == (Code.RESOURCE_EXHAUSTED, "ADAPTER_ROOM")
    assert failed.metadata == {"neededBytes": "264", "freeBytes": "0", "maxAdapters": "1"}


@pytest.mark.parametrize("path", ["../a.gguf", "/etc/passwd", "out", "."])
async def test_a_path_outside_the_folder(tmp_path: Path, path: str) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "out").symlink_to(tmp_path)
    async with with_folder(inside) as it:
        failed = await failure(load(it, "x", path))
    assert (failed.code, failed.reason) == (Code.PERMISSION_DENIED, "PATH_OUTSIDE_ROOT")
    assert failed.metadata == {"path": path}


async def test_files_that_cannot_be_attached(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    write(tmp_path, "large", rank=5)
    write(tmp_path, "other", architecture="llama")
    write_adapter(
        tmp_path / "wide.gguf",
        TinyAdapter(architecture="fake", rank=2),
        {WEIGHT: (4, 6)},
        (WEIGHT,),
    )
    nan = np.full((2, 4), np.nan, np.float32)
    keys = {"general.type": "adapter", "adapter.type": "lora"}
    halves = {f"{WEIGHT}.lora_a": (nan, Type.F32), f"{WEIGHT}.lora_b": (nan.T.copy(), Type.F32)}
    write_gguf(tmp_path / "nan.gguf", keys, halves, architecture="fake")
    cases = {
        "gone": (Code.NOT_FOUND, "ADAPTER_FILE_NOT_FOUND", {"path": "gone.gguf"}),
        "text": (Code.INVALID_ARGUMENT, "ADAPTER_FILE_INVALID", None),
        "nan": (Code.INVALID_ARGUMENT, "ADAPTER_FILE_INVALID", None),
        "large": (
            Code.OUT_OF_RANGE,
            "RANK_TOO_LARGE",
            {"path": "large.gguf", "tensor": WEIGHT, "rank": "5", "maxRank": "4"},
        ),
        "other": (
            Code.FAILED_PRECONDITION,
            "ADAPTER_MISMATCH",
            {
                "path": "other.gguf",
                "tensor": "general.architecture",
                "expected": "'fake'",
                "found": "'llama'",
            },
        ),
        "wide": (
            Code.FAILED_PRECONDITION,
            "ADAPTER_MISMATCH",
            {
                "path": "wide.gguf",
                "tensor": f"{WEIGHT}.lora_a",
                "expected": "2x4",
                "found": "2x6",
            },
        ),
    }
    async with with_folder(tmp_path) as it:
        for name, (code, reason, metadata) in cases.items():
            failed = await failure(load(it, name))
            assert (failed.code, failed.reason) == (code, reason), name
            assert str(tmp_path) not in failed.text
            if metadata is not None:
                assert failed.metadata == metadata
        assert not (await listed(it)).adapters


@pytest.mark.parametrize(
    ("method", "request_", "fields"),
    [
        ("SetAdapterScales", lora_pb2.SetAdapterScalesRequest(), ["scales"]),
        (
            "SetAdapterScales",
            lora_pb2.SetAdapterScalesRequest(scales=scales((0, 1.0), (0, 2.0))),
            ["scales.scales[1].adapter_id"],
        ),
        (
            "SetAdapterScales",
            lora_pb2.SetAdapterScalesRequest(scales=scales((0, float("nan")))),
            ["scales.scales[0].scale"],
        ),
        (
            "SetAdapterScales",
            lora_pb2.SetAdapterScalesRequest(
                scales=common_pb2.AdapterScales(scales=[common_pb2.AdapterScale(adapter_id=0)])
            ),
            ["scales.scales[0].scale"],
        ),
        (
            "SetAdapterScales",
            lora_pb2.SetAdapterScalesRequest(scales=scales(*((one, 1.0) for one in range(257)))),
            ["scales.scales"],
        ),
        ("LoadAdapter", lora_pb2.LoadAdapterRequest(path="a"), ["name"]),
        ("LoadAdapter", lora_pb2.LoadAdapterRequest(name="a", path="a\0"), ["path"]),
        (
            "LoadAdapter",
            lora_pb2.LoadAdapterRequest(name="a", path="a", scale=float("inf")),
            ["scale"],
        ),
        ("UnloadAdapter", lora_pb2.UnloadAdapterRequest(), ["adapter_id"]),
    ],
)
async def test_bad_fields(tmp_path: Path, method: str, request_: Any, fields: list[str]) -> None:
    async with with_folder(tmp_path) as it:
        failed = await failure(getattr(it.lora, method)(request_))
    assert (failed.code, failed.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failed.fields == fields


async def test_a_path_in_an_error_is_short_enough_to_arrive(tmp_path: Path) -> None:
    """Each of these characters is nine in a trailer."""
    async with with_folder(tmp_path) as it:
        for path in ("\uff0e" * 1365, "../" + "\uff0e" * 1364):
            failed = await failure(load(it, "a", path))
            assert failed.reason in ("ADAPTER_FILE_NOT_FOUND", "PATH_OUTSIDE_ROOT")
            assert len(failed.metadata["path"]) < 256


async def test_an_unknown_id_changes_no_scale(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as it:
        await load(it, "a")
        request = lora_pb2.SetAdapterScalesRequest(scales=scales((0, 0.0), (7, 1.0)))
        failed = await failure(it.lora.SetAdapterScales(request))
        assert (await listed(it)).adapters[0].scale == 1.0
    assert (failed.code, failed.reason) == (Code.NOT_FOUND, "NO_SUCH_ADAPTER")
    assert failed.metadata == {"adapterId": "7"}


def _ask(adapters: common_pb2.AdapterScales | None, slot_id: int = 0) -> GenerateRequest:
    request = GenerateRequest(
        tokens=common_pb2.TokenIds(ids=range(20, 60)),
        slot_id=slot_id,
        max_tokens=3,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0),
    )
    if adapters is not None:
        request.adapters.CopyFrom(adapters)
    return request


async def test_a_saved_slot_is_used_under_its_own_set_alone(tmp_path: Path) -> None:
    """By content and scale: neither the id nor the server's scales matter."""
    saved = slot_pb2.SaveSlotRequest(slot_id=0, filename="a.slot")
    restore = slot_pb2.RestoreSlotRequest(slot_id=1, filename="a.slot")
    erase = [slot_pb2.EraseSlotRequest(slot_id=one) for one in (0, 1)]
    (tmp_path / "slots").mkdir()
    async with with_folder(tmp_path, slot_save_path=str(tmp_path / "slots")) as it:
        await load(it, "a", scale=0.0)
        own = scales((0, 0.5))
        cold = text_of(await it.collect(_ask(own)))
        await it.slots.SaveSlot(saved)

        async def restored_cached(adapters: common_pb2.AdapterScales | None) -> tuple[int, str]:
            for one in erase:
                await it.slots.EraseSlot(one)
            await it.slots.RestoreSlot(restore)
            responses = await it.collect(_ask(adapters, slot_id=1))
            return responses[0].started.cached_tokens, text_of(responses)

        assert await restored_cached(own) == (39, cold)
        for other in (scales(), scales((0, 1.0)), None):
            cached, text = await restored_cached(other)
            assert (cached, text != cold) == (0, True)
        # The server's set may be the same one.
        await it.lora.SetAdapterScales(lora_pb2.SetAdapterScalesRequest(scales=own))
        assert await restored_cached(None) == (39, cold)
        await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=0))
        await load(it, "b")
        gone = await failure(it.slots.RestoreSlot(restore))
        assert (await load(it, "again", "a.gguf", scale=0.0)).id == 2
        assert await restored_cached(scales((2, 0.5))) == (39, cold)
    assert (gone.code, gone.reason) == (Code.FAILED_PRECONDITION, "SLOT_FILE_MISMATCH")
    assert gone.metadata["field"] == "adapters"

"""Slot files beside adapter sets: state goes on under the very set that it was made under."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvarts.v1 import common_pb2, generation_pb2, lora_pb2, slot_pb2

from tests.contract.serving import GenerateRequest, SamplingParams, Serving, failure, serving
from tests.contract.test_lora import load, scales, write

Code = grpc.StatusCode
PROMPT = tuple(range(20, 60))
# By content, with its scale; what is off is in no set.
SETS: dict[str, dict[str, float]] = {
    "none": {},
    "a": {"a": 1.0},
    "a-half": {"a": 0.5},
    "b": {"b": 1.0},
    "a-b": {"a": 1.0, "b": -2.0},
}


async def _load(it: Serving, names: str) -> dict[str, int]:
    """Loads adapters in this order, switched off; returns their ids."""
    return {name: (await load(it, name, scale=0.0)).id for name in names}


def _set(ids: dict[str, int], chosen: dict[str, float]) -> common_pb2.AdapterScales:
    return scales(*((ids[name], scale) for name, scale in chosen.items()))


async def _served(
    it: Serving, tokens: tuple[int, ...], adapters: common_pb2.AdapterScales, slot_id: int = 0
) -> generation_pb2.Finished:
    request = GenerateRequest(
        tokens=common_pb2.TokenIds(ids=tokens),
        slot_id=slot_id,
        max_tokens=1,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0),
        adapters=adapters,
    )
    return (await it.collect(request))[-1].finished


def _folders(tmp_path: Path) -> dict[str, Any]:
    adapters, slots = tmp_path / "adapters", tmp_path / "slots"
    for folder in (adapters, slots):
        folder.mkdir(exist_ok=True)
    for seed, name in enumerate("abc"):
        write(adapters, name, seed=seed)
    return {"adapter_dir": str(adapters), "slot_save_path": str(slots), "num_adapters": 3}


async def _save_all(tmp_path: Path) -> None:
    """Saves the same prompt under every set, one file each."""
    async with serving(**_folders(tmp_path)) as it:
        ids = await _load(it, "ab")
        for name, chosen in SETS.items():
            await _served(it, PROMPT, _set(ids, chosen))
            saved = await it.slots.SaveSlot(slot_pb2.SaveSlotRequest(slot_id=0, filename=name))
            assert saved.saved_tokens == len(PROMPT)


async def test_state_is_reused_under_its_own_set_and_no_other(tmp_path: Path) -> None:
    await _save_all(tmp_path)
    for made, asked in itertools.product(SETS, SETS):
        async with serving(**_folders(tmp_path)) as it:
            ids = await _load(it, "cba")  # other ids than when it was saved
            restored = await it.slots.RestoreSlot(
                slot_pb2.RestoreSlotRequest(slot_id=1, filename=made)
            )
            assert restored.restored_tokens == len(PROMPT)
            longer = (*PROMPT, 61)
            finished = await _served(it, longer, _set(ids, SETS[asked]), slot_id=1)
            assert finished.cached_tokens == (len(PROMPT) if made == asked else 0), (made, asked)


@pytest.mark.parametrize("loaded", ["", "a", "b", "c", "ca"])
async def test_state_of_an_adapter_that_is_not_loaded_is_refused(
    tmp_path: Path, loaded: str
) -> None:
    await _save_all(tmp_path)
    async with serving(**_folders(tmp_path)) as it:
        ids = await _load(it, loaded)
        await _served(it, PROMPT[:20], scales(), slot_id=0)
        for name, chosen in SETS.items():
            call = it.slots.RestoreSlot(slot_pb2.RestoreSlotRequest(slot_id=0, filename=name))
            if set(chosen) <= set(loaded):
                await call
                await _served(it, PROMPT[:20], scales(), slot_id=0)
                continue
            failed = await failure(call)
            assert (failed.code, failed.reason) == (Code.FAILED_PRECONDITION, "SLOT_FILE_MISMATCH")
            assert failed.metadata["field"] == "adapters"
            assert failed.metadata["expected"] == (", ".join(loaded) or "none")
            # The slot is what it was.
            finished = await _served(it, (*PROMPT[:20], 70), scales(), slot_id=0)
            assert finished.cached_tokens == 20
        assert len(ids) == len(loaded)


async def test_another_content_of_the_same_name_is_another_adapter(tmp_path: Path) -> None:
    await _save_all(tmp_path)
    folders = _folders(tmp_path)
    write(tmp_path / "adapters", "a", seed=77)
    async with serving(**folders) as it:
        await _load(it, "a")
        call = it.slots.RestoreSlot(slot_pb2.RestoreSlotRequest(slot_id=0, filename="a"))
        assert (await failure(call)).metadata["field"] == "adapters"


async def test_an_adapter_that_was_unloaded_takes_its_files_with_it(tmp_path: Path) -> None:
    await _save_all(tmp_path)
    async with serving(**_folders(tmp_path)) as it:
        ids = await _load(it, "ab")
        restore = slot_pb2.RestoreSlotRequest(slot_id=0, filename="a")
        assert (await it.slots.RestoreSlot(restore)).restored_tokens == len(PROMPT)
        await it.lora.UnloadAdapter(lora_pb2.UnloadAdapterRequest(adapter_id=ids["a"]))
        assert (await failure(it.slots.RestoreSlot(restore))).reason == "SLOT_FILE_MISMATCH"
        listed = await it.slots.ListSlotFiles(slot_pb2.ListSlotFilesRequest())
        refused = {file.filename for file in listed.files if file.refusal}
        assert refused == {"a", "a-half", "a-b"}

"""SlotService on a server: files, prompts, refusals, tenants, the stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvarts.v1 import common_pb2, error_reason_pb2, generation_pb2, slot_pb2

from engine.slots.identity import Identity
from engine.slots.store import SlotStore
from service.autosave import Autosave
from tests.contract.serving import (
    GenerateRequest,
    SamplingParams,
    Serving,
    StepGate,
    failure,
    gated_runner,
    serving,
)
from tests.contract.test_lifecycle import BreakableClock
from tests.waiting import until_so

Code = grpc.StatusCode
NAME = "a.slot"
Save = slot_pb2.SaveSlotRequest
Restore = slot_pb2.RestoreSlotRequest
Files = slot_pb2.ListSlotFilesRequest


def _ids(*tokens: int) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=tokens)


def _ask(tokens: list[int], slot_id: int = 0, max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        tokens=_ids(*tokens),
        slot_id=slot_id,
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0),
    )


async def _finished(it: Serving, request: GenerateRequest, **call: Any) -> generation_pb2.Finished:
    return (await it.collect(request, **call))[-1].finished


def _store(it: Serving) -> SlotStore:
    store = it.server._bridge.model.slot_store  # pyright: ignore[reportPrivateUsage]
    assert store is not None
    return store


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


PROMPT = list(range(20, 60))


async def test_save_restart_restore_and_go_on(tmp_path: Path):
    async with serving(slot_save_path=str(tmp_path)) as it:
        assert (await _finished(it, _ask(PROMPT))).held_tokens == 42
        saved = await it.slots.SaveSlot(Save(slot_id=0, filename=NAME))
        assert (saved.slot_id, saved.filename, saved.saved_tokens) == (0, NAME, 42)
        assert saved.size_bytes == (tmp_path / NAME).stat().st_size
        await until_so(it.is_clean)
    async with serving(slot_save_path=str(tmp_path)) as it:
        restored = await it.slots.RestoreSlot(Restore(slot_id=2, filename=NAME))
        assert (restored.slot_id, restored.restored_tokens) == (2, 42)
        assert restored.size_bytes == saved.size_bytes
        # Lists read what was published after a step; the answer may come a moment earlier.
        await until_so(it.is_clean)
        slot = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots[2]
        assert (slot.held_tokens, slot.state) == (42, slot_pb2.SLOT_STATE_IDLE)
        finished = await _finished(it, _ask([*PROMPT, 61], 2))
        assert finished.cached_tokens == 40
        await until_so(it.is_clean)


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [
        ({"text": "Hi there"}, 9),
        ({"tokens": _ids(5, 6, 7)}, 3),
        (
            {
                "chat": common_pb2.ChatPrompt(
                    messages=[common_pb2.ChatMessage(role="user", content="Hi")]
                )
            },
            19,
        ),
    ],
)
async def test_a_prompt_is_warmed_and_saved_in_one_call(
    tmp_path: Path, prompt: dict[str, Any], num_tokens: int
):
    async with serving(slot_save_path=str(tmp_path)) as it:
        saved = await it.slots.SaveSlot(Save(slot_id=1, filename=NAME, **prompt))
        assert (saved.saved_tokens, saved.cached_tokens) == (num_tokens, 0)
        assert saved.cache_source == generation_pb2.CACHE_SOURCE_NONE
        assert saved.no_reuse_reason
        again = await it.slots.SaveSlot(Save(slot_id=1, filename="b", **prompt))
        assert again.cached_tokens == num_tokens - 1
        assert again.cache_source == generation_pb2.CACHE_SOURCE_SLOT
        assert not again.no_reuse_reason
        slot = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots[1]
        assert slot.held_tokens == num_tokens
        assert (tmp_path / NAME).read_bytes()[:100] == (tmp_path / "b").read_bytes()[:100]
        await until_so(it.is_clean)


async def test_a_prompt_of_no_tokens_is_refused_and_writes_nothing(tmp_path: Path):
    class Silent:
        """A vocabulary that begins nothing with BOS."""

        vocab_size, add_bos, add_eos = 100, False, False
        eog_tokens = frozenset[int]()

        def encode(self, text: str, **_: Any) -> list[int]:
            return [5] * len(text)

    async with serving(slot_save_path=str(tmp_path), model={"tokenizer": Silent()}) as it:
        prompts: list[dict[str, Any]] = [{"text": ""}, {"tokens": _ids()}]
        for prompt in prompts:
            failed = await failure(it.slots.SaveSlot(Save(slot_id=0, filename=NAME, **prompt)))
            assert (failed.code, failed.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert "no tokens" in failed.text
    assert _names(tmp_path) == set()


async def test_warming_has_the_errors_of_generate(tmp_path: Path):
    async with serving(slot_save_path=str(tmp_path)) as it:
        for prompt, reason in (
            (_ids(10**6), "TOKEN_NOT_IN_VOCAB"),
            (_ids(*[5] * 256), "CONTEXT_OVERFLOW"),
        ):
            failed = await failure(it.slots.SaveSlot(Save(slot_id=0, filename=NAME, tokens=prompt)))
            assert failed.reason == reason
        adapters = common_pb2.AdapterScales(
            scales=[common_pb2.AdapterScale(adapter_id=3, scale=1.0)]
        )
        request = Save(slot_id=0, filename=NAME, text="Hi", adapters=adapters)
        assert (await failure(it.slots.SaveSlot(request))).reason == "NO_SUCH_ADAPTER"
    assert _names(tmp_path) == set()


async def test_a_busy_slot_is_waited_for_within_the_deadline_or_refused(tmp_path: Path):
    gate = StepGate()
    async with serving(slot_save_path=str(tmp_path), runner=gated_runner(gate)) as it:
        running = asyncio.create_task(_finished(it, _ask(PROMPT, max_tokens=9)))
        await gate.arrival()
        for call, request in (
            (it.slots.SaveSlot, Save(slot_id=0, filename=NAME, fail_if_busy=True)),
            (it.slots.SaveSlot, Save(slot_id=0, filename=NAME, fail_if_busy=True, text="a")),
        ):
            asked = asyncio.create_task(failure(call(request)))
            await it.commanded("submit" if request.text else "transfer_slot")
            for _ in range(2):  # a request's failure is told after the next step
                gate.step()
                await gate.arrival()
            failed = await asked
            assert (failed.code, failed.reason) == (Code.ABORTED, "SLOT_BUSY")
            assert failed.retry_s is not None
        late = await failure(it.slots.SaveSlot(Save(slot_id=0, filename=NAME), timeout=0.2))
        assert late.code == Code.DEADLINE_EXCEEDED
        asked = asyncio.create_task(_awaited(it.slots.SaveSlot(Save(slot_id=0, filename=NAME))))
        await it.commanded("transfer_slot")
        gate.open()
        assert (await asked).saved_tokens == (await running).held_tokens
        await until_so(it.is_clean)


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("missing", Code.NOT_FOUND, "SLOT_FILE_NOT_FOUND"),
        ("folder", Code.DATA_LOSS, "SLOT_FILE_CORRUPT"),
        ("garbage", Code.DATA_LOSS, "SLOT_FILE_CORRUPT"),
        ("cut", Code.DATA_LOSS, "SLOT_FILE_CORRUPT"),
        ("flipped", Code.DATA_LOSS, "SLOT_FILE_CORRUPT"),
    ],
)
async def test_damaged_files_are_refused_by_reason(
    tmp_path: Path, name: str, code: grpc.StatusCode, reason: str
):
    async with serving(slot_save_path=str(tmp_path)) as it:
        await _finished(it, _ask(PROMPT))
        await it.slots.SaveSlot(Save(slot_id=0, filename=NAME))
        data = (tmp_path / NAME).read_bytes()
        (tmp_path / "folder").mkdir()
        (tmp_path / "garbage").write_bytes(b"garbage" * 9)
        (tmp_path / "cut").write_bytes(data[:-1])
        (tmp_path / "flipped").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        failed = await failure(it.slots.RestoreSlot(Restore(slot_id=0, filename=name)))
        assert (failed.code, failed.reason) == (code, reason)
        assert failed.metadata["filename"] == name
        assert str(tmp_path) not in failed.text
        assert (await _finished(it, _ask([*PROMPT, 61]))).cached_tokens == 40
        await until_so(it.is_clean)


async def test_state_of_another_model_or_longer_is_refused(tmp_path: Path):
    async with serving(slot_save_path=str(tmp_path)) as it:
        await _finished(it, _ask(PROMPT))
        await it.slots.SaveSlot(Save(slot_id=0, filename=NAME))
    async with serving(slot_save_path=str(tmp_path), identity={"weights": "other"}) as it:
        failed = await failure(it.slots.RestoreSlot(Restore(slot_id=0, filename=NAME)))
        assert (failed.code, failed.reason) == (Code.FAILED_PRECONDITION, "SLOT_FILE_MISMATCH")
        assert failed.metadata["field"] == "weights"
        assert failed.metadata["expected"] != failed.metadata["found"]
        (file,) = (await it.slots.ListSlotFiles(Files())).files
        assert file.refusal == error_reason_pb2.ERROR_REASON_SLOT_FILE_MISMATCH


async def test_the_identity_is_waited_for_within_the_deadline(tmp_path: Path):
    async with serving(slot_save_path=str(tmp_path), identity={"is_ready": False}) as it:
        identity: Identity = _store(it).identity
        failed = await failure(it.slots.SaveSlot(Save(slot_id=0, filename=NAME), timeout=0.5))
        assert (failed.code, failed.reason) == (Code.UNAVAILABLE, "IDENTITY_PENDING")
        assert failed.retry_s is not None
        # Generation goes on, and so does what needs no identity.
        assert (await _finished(it, _ask(PROMPT))).held_tokens == 42
        assert not (await it.slots.ListSlotFiles(Files())).files
        failed = await failure(it.slots.RestoreSlot(Restore(slot_id=0, filename=NAME)))
        assert failed.reason == "SLOT_FILE_NOT_FOUND"
        asked = asyncio.create_task(_awaited(it.slots.SaveSlot(Save(slot_id=0, filename=NAME))))
        await until_so(lambda: identity.num_waiting > 0)
        identity.run()
        assert (await asked).saved_tokens == 42


async def test_files_are_listed_by_page_and_deleted(tmp_path: Path):
    async with serving(slot_save_path=str(tmp_path)) as it:
        await _finished(it, _ask(PROMPT))
        for name in ("c", "a", "b"):
            await it.slots.SaveSlot(Save(slot_id=0, filename=name))
        (tmp_path / "z").write_bytes(b"no slot")
        first = await it.slots.ListSlotFiles(Files(page_size=2))
        assert ([file.filename for file in first.files], first.next_page_token) == (["a", "b"], "b")
        rest = await it.slots.ListSlotFiles(Files(page_size=2, page_token="b"))
        assert ([file.filename for file in rest.files], rest.next_page_token) == (["c", "z"], "")
        whole, broken = rest.files
        assert (whole.num_tokens, whole.model_name) == (42, "Fake")
        assert whole.size_bytes == (tmp_path / "c").stat().st_size
        assert whole.modified_time.ToNanoseconds() == (tmp_path / "c").stat().st_mtime_ns
        assert whole.refusal == error_reason_pb2.ERROR_REASON_UNSPECIFIED
        assert broken.refusal == error_reason_pb2.ERROR_REASON_SLOT_FILE_CORRUPT
        deleted = await it.slots.DeleteSlotFile(slot_pb2.DeleteSlotFileRequest(filename="a"))
        assert deleted.size_bytes == whole.size_bytes
        failed = await failure(
            it.slots.DeleteSlotFile(slot_pb2.DeleteSlotFileRequest(filename="a"))
        )
        assert (failed.code, failed.reason) == (Code.NOT_FOUND, "SLOT_FILE_NOT_FOUND")


def _key(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}"),)


async def test_keys_do_not_see_each_others_slots_and_files(tmp_path: Path):
    one: dict[str, Any] = {"metadata": _key("one")}
    two: dict[str, Any] = {"metadata": _key("two")}
    async with serving(slot_save_path=str(tmp_path), api_keys=("one", "two")) as it:
        await _finished(it, _ask(PROMPT), **one)
        failed = await failure(it.slots.SaveSlot(Save(slot_id=0, filename=NAME), **two))
        assert (failed.code, failed.reason) == (Code.NOT_FOUND, "SLOT_CONTENT_NOT_FOUND")
        await it.slots.SaveSlot(Save(slot_id=0, filename=NAME), **one)
        assert not (await it.slots.ListSlotFiles(Files(), **two)).files
        assert len((await it.slots.ListSlotFiles(Files(), **one)).files) == 1
        for call in (
            it.slots.RestoreSlot(Restore(slot_id=0, filename=NAME), **two),
            it.slots.DeleteSlotFile(slot_pb2.DeleteSlotFileRequest(filename=NAME), **two),
        ):
            failed = await failure(call)
            assert (failed.code, failed.reason) == (Code.NOT_FOUND, "SLOT_FILE_NOT_FOUND")
        await it.slots.RestoreSlot(Restore(slot_id=1, filename=NAME), **one)
        assert (await _finished(it, _ask([*PROMPT, 61], 1), **two)).cached_tokens == 0
        await until_so(it.is_clean)


async def test_the_admin_restores_a_users_state_to_the_user(tmp_path: Path):
    keys: dict[str, Any] = {"api_keys": ("user",), "admin_key": "root"}
    user: dict[str, Any] = {"metadata": _key("user")}
    admin: dict[str, Any] = {"metadata": _key("root")}
    async with serving(slot_save_path=str(tmp_path), **keys) as it:
        await _finished(it, _ask(PROMPT), **user)
        await it.slots.SaveSlot(Save(slot_id=0, filename=NAME), **admin)
    async with serving(slot_save_path=str(tmp_path), **keys) as it:
        await it.slots.RestoreSlot(Restore(slot_id=0, filename=NAME), **admin)
        assert (await _finished(it, _ask([*PROMPT, 61]), **admin)).cached_tokens == 0
        await it.slots.RestoreSlot(Restore(slot_id=0, filename=NAME), **admin)
        assert (await _finished(it, _ask([*PROMPT, 61]), **user)).cached_tokens == 40


async def test_slots_come_back_after_a_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    auto: dict[str, Any] = {"slot_save_path": str(tmp_path), "slot_autosave": True}
    async with serving(**auto) as it:
        await _finished(it, _ask(PROMPT))
        await _finished(it, _ask([7, 8, 9], 3))
    assert _autosaved(tmp_path) == ["0", "3"]
    async with serving(**auto) as it:
        await _restored(it, {0: 42, 3: 5})
        assert (await _finished(it, _ask([*PROMPT, 61]))).cached_tokens == 40
        assert not (await it.slots.ListSlotFiles(Files())).files
        await it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=3))
    assert _autosaved(tmp_path) == ["0"]
    # Another model's slots begin empty, and leave these alone.
    async with serving(**auto, identity={"weights": "other"}) as it:
        await _finished(it, _ask([5, 6], 1))
    assert len(_autosaved(tmp_path)) == 2
    async with serving(**auto) as it:
        await _restored(it, {0: 43})
    assert "is not restored" not in caplog.text


async def test_slots_of_an_earlier_version_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Its files did not tell whose they are; a damaged one stays, and is told of."""
    auto: dict[str, Any] = {"slot_save_path": str(tmp_path), "slot_autosave": True}
    async with serving(**auto) as it:
        await _finished(it, _ask(PROMPT))
    (saved,) = (name for name in _names(tmp_path) if name.startswith(".autosave-0-"))
    (tmp_path / saved).rename(tmp_path / ".autosave-0")
    damaged = tmp_path / ".autosave-3"
    damaged.write_bytes(b"nothing")
    async with serving(**auto) as it:
        await _restored(it, {0: 42})
        assert (await _finished(it, _ask([*PROMPT, 61]))).cached_tokens == 40
    assert "a slot of an earlier version is not restored" in caplog.text
    assert damaged.read_bytes() == b"nothing"
    assert saved in _names(tmp_path)
    assert ".autosave-0" not in _names(tmp_path)


def _autosaved(folder: Path) -> list[str]:
    """The ids of the slots that servers saved of their own accord, of all models."""
    return sorted(name.split("-")[1] for name in _names(folder) if name.startswith(".autosave-"))


async def _restored(it: Serving, expected: dict[int, int]) -> None:
    async with asyncio.timeout(30):
        while True:
            slots = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
            held = {slot.id: slot.held_tokens for slot in slots if slot.held_tokens}
            if held == expected and all(s.state == slot_pb2.SLOT_STATE_IDLE for s in slots):
                return


async def test_a_running_request_is_saved_with_its_slot_within_the_drain_time(tmp_path: Path):
    gate = StepGate()
    auto: dict[str, Any] = {"slot_save_path": str(tmp_path), "slot_autosave": True}
    async with serving(**auto, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(_finished(it, _ask(PROMPT, max_tokens=200)))
        await gate.arrival()
        stopping = asyncio.create_task(it.server.stop(30.0))
        for _ in range(4):
            gate.step()
            await gate.arrival()
        gate.open()
        await stopping
        await asyncio.gather(running, return_exceptions=True)
    assert _autosaved(tmp_path) == ["0"]


async def test_a_stop_before_slots_are_restored_keeps_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def late(*_: object) -> None:
        await asyncio.Event().wait()

    auto: dict[str, Any] = {"slot_save_path": str(tmp_path), "slot_autosave": True}
    async with serving(**auto) as it:
        await _finished(it, _ask(PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(Autosave, "_restore", late)
        async with serving(**auto):
            pass
    async with serving(**auto) as it:
        await _restored(it, {0: 42})


async def test_a_dead_engine_saves_nothing_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    gate, clock = StepGate(), BreakableClock()
    auto: dict[str, Any] = {"slot_save_path": str(tmp_path), "slot_autosave": True}
    async with serving(**auto, runner=gated_runner(gate), clock=clock) as it:
        running = asyncio.create_task(failure(_finished(it, _ask(PROMPT))))
        await gate.arrival()
        clock.is_broken = True
        gate.open()
        assert (await running).reason == "ENGINE_FAULT"
        clock.is_broken = False
    assert "slots are not saved: the engine failed" in caplog.text
    assert not _autosaved(tmp_path)


async def test_files_of_dead_saves_are_swept_at_the_start(tmp_path: Path):
    left = tmp_path / f".saving-{'a' * 32}"
    left.write_bytes(b"half")
    async with serving(slot_save_path=str(tmp_path)):
        assert not left.exists()


async def test_no_cache_prompt_beside_a_folder_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from service.defaults import GenerationDefaults
    from service.server import serve
    from tests.contract.serving import options

    stop = asyncio.Event()
    stop.set()
    for cache_prompt in (True, False):
        caplog.clear()
        told = options(
            slot_save_path=str(tmp_path), defaults=GenerationDefaults(cache_prompt=cache_prompt)
        )
        await serve(told, stop, lambda sink: pytest.fail("loaded"))
        assert ("--no-cache-prompt" in caplog.text) != cache_prompt


class _WallClock:
    """Wall time that somebody sets; clients and the transport read it when a call begins."""

    def __init__(self) -> None:
        self._real = time.time
        self.offset_s = 0.0

    def time(self) -> float:
        return self._real() + self.offset_s

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


@pytest.mark.parametrize("leap_s", [86_400.0, -86_400.0])
async def test_a_clock_that_leaps_by_a_day_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leap_s: float
):
    """Check 33: what is measured, and every deadline, goes by a clock that only rises."""
    wall, gate = _WallClock(), StepGate()
    monkeypatch.setattr(time, "time", wall.time)
    monkeypatch.setattr(time, "time_ns", wall.time_ns)
    async with serving(
        slot_save_path=str(tmp_path), clock=time.monotonic, runner=gated_runner(gate)
    ) as it:
        running = asyncio.create_task(it.collect(_ask(PROMPT), timeout=60))
        late = asyncio.create_task(it.collect(_ask(PROMPT, 1, max_tokens=200), timeout=0.5))
        for _ in range(2):
            await it.commanded("submit")
        wall.offset_s = leap_s
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        gate.open()
        finished = (await running)[-1].finished
        assert finished.completion_tokens == 3
        spans = [value for _, value in finished.ListFields()]
        measured = [one.ToNanoseconds() for one in spans if hasattr(one, "ToNanoseconds")]
        assert measured
        assert all(0 <= one < 60e9 for one in measured)
        saved = await it.slots.SaveSlot(Save(slot_id=0, filename=NAME))
        # The file may be from the future, or from long ago.
        written_s = wall.time() - 2 * leap_s
        os.utime(tmp_path / NAME, (written_s, written_s))
        restored = await it.slots.RestoreSlot(Restore(slot_id=2, filename=NAME))
        assert restored.restored_tokens == saved.saved_tokens == 42
        for elapsed in (saved.elapsed, restored.elapsed):
            assert 0 <= elapsed.ToNanoseconds() < 60e9
        assert len((await it.slots.ListSlotFiles(Files())).files) == 1
        wall.offset_s = 0.0
        assert (await _finished(it, _ask([*PROMPT, 61], 2), timeout=60)).cached_tokens == 40
        await until_so(it.is_clean)

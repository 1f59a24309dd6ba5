"""Other sizes for the pools: refused by arithmetic, exact afterwards, undone when something fails."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from engine.errors import EngineError, KvPagesExhausted
from engine.failpoints import Failpoints, Site
from engine.memory.errors import (
    BelowFloor,
    NoSuchPool,
    PoolsBusy,
    RebuildFailed,
    RebuildRolledBack,
    TooLarge,
)
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport, RebuildState, RebuildWish, Stage
from engine.step import PoolLost
from engine.types import CacheSource, PoolKind
from tests.fake_runner import EXPERTS
from tests.unit.engine.drive import Drive, ask, solo

PROMPT = tuple(range(10, 40))
STAGES = [
    (Site.REBUILD_COMPILE, Stage.COMPILE),
    (Site.REBUILD_COPY_OUT, Stage.COPY_OUT),
    (Site.REBUILD_FREE, Stage.FREE),
    (Site.REBUILD_ALLOCATE, Stage.ALLOCATE),
    (Site.REBUILD_COPY_BACK, Stage.COPY_BACK),
    (Site.REBUILD_WARM, Stage.WARM),
]
# What a model may be besides full attention.
KINDS = {
    "full": {},
    "window": {"window": 8},
    "recurrent": {"mamba_slots": 6},
    "experts": {"num_experts": EXPERTS.ceiling},
}


def error(done: Future[RebuildReport]) -> EngineError:
    assert done.done()
    raised = done.exception()
    assert isinstance(raised, EngineError), raised
    return raised


def sizes(drive: Drive) -> dict[PoolKind, int]:
    return {pool.kind: pool.size for pool in drive.engine.snapshot().pools}


def served(drive: Drive, name: str, prompt: tuple[int, ...] = PROMPT, count: int = 5) -> int:
    """Runs a request, checks its answer, and returns how many of its tokens were cached."""
    drive.engine.submit(ask(name, prompt, count))
    drive.rest()
    assert drive.tokens(name) == solo(prompt, count, drive.runner.window)
    return drive.started(name).cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_growing_keeps_every_prefix_and_slot(kind: str) -> None:
    drive = Drive(kv_pages=24, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    served(drive, "before")
    report = drive.rebuild(PoolSizes(kv=48)).result(0)
    assert (report.previous.kv, report.current.kv) == (24, 48)
    assert report.kept.slot_ids == (1,)
    assert report.dropped.prefix_tokens == report.dropped.snapshots == 0
    assert report.dropped.slot_ids == ()
    assert sizes(drive)[PoolKind.KV] == 48
    assert served(drive, "after") == len(PROMPT) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_shrinking_drops_the_least_recently_used(kind: str) -> None:
    drive = Drive(kv_pages=32, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    old, new = tuple(range(50, 80)), PROMPT
    served(drive, "old", old)
    served(drive, "new", new)
    plan = drive.rebuild(PoolSizes(kv=12), validate_only=True).result(0)
    report = drive.rebuild(PoolSizes(kv=12)).result(0)
    assert report.dropped.slot_ids == (1,)
    assert report.kept.slot_ids == (0,)
    assert report.dropped.prefix_tokens > 0
    assert (plan.kept, plan.dropped) == (report.kept, report.dropped)
    assert served(drive, "again", new) == len(new) - 1
    assert served(drive, "gone", old) < len(old) - 1


def test_what_moves_to_the_host_is_kept() -> None:
    drive = Drive(kv_pages=32, host_cache_bytes=None)
    old = tuple(range(50, 80))
    served(drive, "old", old)
    served(drive, "new")
    plan = drive.rebuild(PoolSizes(kv=9), validate_only=True).result(0)
    report = drive.rebuild(PoolSizes(kv=9)).result(0)
    assert report.dropped.prefix_tokens == 0
    assert report.dropped.slot_ids == (1,)
    assert (plan.kept, plan.dropped) == (report.kept, report.dropped)
    assert served(drive, "again", old) > 0
    assert drive.started("again").cache_source is CacheSource.HOST


def test_pools_that_are_not_named_keep_their_size() -> None:
    drive = Drive(window=8)
    swa = sizes(drive)[PoolKind.SWA]
    drive.rebuild(PoolSizes(kv=10)).result(0)
    assert sizes(drive) == {PoolKind.KV: 10, PoolKind.SWA: swa}
    drive.rebuild(PoolSizes(swa=swa + 5)).result(0)
    assert sizes(drive) == {PoolKind.KV: 10, PoolKind.SWA: swa + 5}


def test_snapshots_beyond_the_new_size_are_dropped() -> None:
    drive = Drive(mamba_slots=6)
    served(drive, "a")
    served(drive, "b", tuple(range(50, 70)))
    held = drive.pool(PoolKind.MAMBA).cached
    report = drive.rebuild(PoolSizes(mamba=2)).result(0)
    assert (report.kept.snapshots, report.dropped.snapshots) == (0, held)
    assert report.kept.slot_ids == (0, 1)
    served(drive, "c")


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("full", PoolSizes(kv=2)),
        ("window", PoolSizes(swa=0)),
        ("recurrent", PoolSizes(mamba=2)),
        ("experts", PoolSizes(moe_cache=EXPERTS.floor)),
    ],
)
def test_at_the_floor_everything_short_is_served(kind: str, target: PoolSizes) -> None:
    drive = Drive(**KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    (pool_kind, size), *_ = target.items()
    floor = drive.pool(pool_kind).floor
    least = PoolSizes(**{pool_kind.value: floor})
    assert size in (0, floor)
    drive.rebuild(least).result(0)
    served(drive, "a", (5, 6, 7), 3)
    refused = error(drive.rebuild(PoolSizes(**{pool_kind.value: floor - 1})))
    assert isinstance(refused, BelowFloor)
    assert refused.violations == ((pool_kind.value, floor - 1, floor),)


@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_experts_alone_touch_no_request_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, least = EXPERTS.ceiling, EXPERTS.floor
    drive = Drive(num_experts=most, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    served(drive, "before")

    def never(*_: object) -> None:
        raise AssertionError("state was touched")

    with monkeypatch.context() as patch:
        for name in ("read_pages", "write_pages", "read_state", "write_state"):
            patch.setattr(drive.runner, name, never)
        shrunk = drive.rebuild(PoolSizes(moe_cache=least)).result(0)
        grown = drive.rebuild(PoolSizes(moe_cache=most)).result(0)
    assert (shrunk.kept.experts, shrunk.dropped.experts) == (least, most - least)
    assert (grown.kept.experts, grown.dropped.experts) == (least, 0)
    for report in (shrunk, grown):
        assert report.kept.slot_ids == (1,)
        assert report.dropped.prefix_tokens == report.dropped.snapshots == 0
    assert drive.pool(PoolKind.MOE_CACHE).size == most
    assert served(drive, "after") == len(PROMPT) - 1


@pytest.mark.parametrize("kind", ["window", "recurrent"])
@pytest.mark.parametrize(("site", "stage"), STAGES)
@pytest.mark.parametrize("grows", [False, True])
def test_a_fault_while_experts_change_is_undone(
    kind: str, site: Site, stage: Stage, grows: bool
) -> None:
    first, then = EXPERTS.ceiling, EXPERTS.floor
    first, then = (then, first) if grows else (first, then)
    failpoints = Failpoints()
    drive = Drive(failpoints=failpoints, num_experts=first, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    served(drive, "before")
    failpoints.armed[site] = 1.0
    failed = error(drive.rebuild(PoolSizes(moe_cache=then)))
    failpoints.disarm()
    assert isinstance(failed, RebuildRolledBack)
    assert failed.stage == stage.value
    assert drive.pool(PoolKind.MOE_CACHE).size == first
    assert served(drive, "after") == len(PROMPT) - 1
    assert drive.rebuild(PoolSizes(moe_cache=then)).result(0).current.moe_cache == then
    assert served(drive, "then") == len(PROMPT) - 1


def test_pools_that_were_lost_though_not_touched_are_empty_books() -> None:
    drive = Drive(num_experts=EXPERTS.ceiling)
    served(drive, "before")
    drive.runner.fail_warm_with = PoolLost("the device went")
    failed = error(drive.rebuild(PoolSizes(moe_cache=EXPERTS.floor)))
    assert isinstance(failed, RebuildRolledBack)
    assert failed.stage == "warm"
    assert served(drive, "after") == 0


# Refusals.


def test_running_requests_refuse_without_a_drain() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", PROMPT, 20))
    drive.steps(3)
    refused = error(drive.rebuild(PoolSizes(kv=1 << 40)))  # before its size is looked at
    assert isinstance(refused, PoolsBusy)
    assert refused.metadata() == {"cause": "requests", "activeRequests": "1"}
    assert drive.rebuild(PoolSizes(kv=10), validate_only=True).result(0).is_busy
    drive.rest()
    assert drive.tokens("a") == solo(PROMPT, 20)


def test_the_order_of_refusals() -> None:
    drive = Drive()
    before = sizes(drive)
    huge = 1 << 40
    assert isinstance(error(drive.rebuild(PoolSizes(kv=huge, swa=1))), NoSuchPool)
    assert isinstance(error(drive.rebuild(PoolSizes(kv=1))), BelowFloor)
    refused = error(drive.rebuild(PoolSizes(kv=huge)))
    assert isinstance(refused, TooLarge)
    page_bytes = drive.plan.page_bytes
    assert refused.needed_bytes == (huge + 1) * page_bytes
    assert (refused.budget_bytes, refused.fixed_bytes) == ((1 << 40) - 1000, 1000)
    assert sizes(drive) == before


def test_copies_that_the_system_has_no_room_for_are_refused_before_anything_is_touched() -> None:
    left: list[int | None] = [None]
    drive = Drive(available_bytes=lambda: left[0])
    served(drive, "a")
    before = sizes(drive)
    plan = drive.rebuild(PoolSizes(kv=16), validate_only=True).result(0)
    # Pages and their sink stay until all is copied.
    more = plan.peak_bytes - (1000 + 33 * drive.plan.page_bytes)
    assert more > 0
    left[0] = more - 1
    for validate_only in (True, False):
        refused = error(drive.rebuild(PoolSizes(kv=16), validate_only=validate_only))
        assert isinstance(refused, TooLarge)
        assert (refused.more_bytes, refused.available_bytes) == (more, more - 1)
        assert refused.metadata()["availableBytes"] == str(more - 1)
        assert f"{more} bytes more than now are taken and the system has {more - 1}" in str(refused)
    assert sizes(drive) == before
    left[0] = more
    assert drive.rebuild(PoolSizes(kv=16)).result(0).kept == plan.kept


def test_room_that_went_during_the_drain_is_missed_before_anything_is_touched() -> None:
    left = [1 << 40]
    drive = Drive(available_bytes=lambda: left[0])
    served(drive, "a")
    before = sizes(drive)
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=16), "r"))
    drive.steps()
    left[0] = 0
    drive.on_the_side().steps(2)
    assert isinstance(error(done), TooLarge)
    assert sizes(drive) == before
    assert served(drive, "again") == len(PROMPT) - 1


def test_an_over_committed_budget_is_negative_and_exceeded_by_everything() -> None:
    drive = Drive(limit_bytes=1)
    refused = error(drive.rebuild(PoolSizes(kv=2)))
    assert isinstance(refused, TooLarge)
    assert refused.budget_bytes == -999


def test_the_same_sizes_are_no_work_even_while_requests_run() -> None:
    drive = Drive(kv_pages=32)
    drive.engine.submit(ask("a", PROMPT, 20))
    drive.steps(3)
    report = drive.rebuild(PoolSizes(kv=32)).result(0)
    assert report.stages == ()
    assert report.previous == report.current
    assert drive.side == []


def test_a_longer_request_is_refused_after_a_shrink_queued_or_not() -> None:
    drive = Drive(kv_pages=32)
    drive.engine.submit(ask("running", (5, 6, 7), 6))
    drive.steps(2)
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=3), "r", drain_s=60.0))
    drive.steps().on_the_side().steps()
    drive.engine.submit(ask("queued", PROMPT, 5))
    drive.rest()
    assert done.result(0).current.kv == 3
    refused = drive.error("queued")
    assert isinstance(refused, KvPagesExhausted)
    assert refused.metadata() == KvPagesExhausted(8, 3).metadata()
    with pytest.raises(KvPagesExhausted):
        drive.engine.submit(ask("late", PROMPT, 5))


def test_what_has_shifted_past_the_pool_goes_on_after_a_rebuild() -> None:
    failpoints = Failpoints()
    drive = Drive(context_shift=True, kv_pages=32, failpoints=failpoints)
    drive.engine.submit(ask("older", (5,), 150))
    drive.engine.submit(ask("younger", (6, 7), 200))
    drive.steps(143)  # more of each than the pool of 34 pages could hold at once
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=34), "r", drain_s=60.0))
    drive.steps().on_the_side().steps()
    failpoints.armed[Site.GROW] = 1.0
    while not drive.engine.snapshot().queued:
        drive.steps()
    failpoints.disarm()
    drive.rest()
    assert done.result(0).current.kv == 34
    assert drive.finished("younger").completion_tokens == 200


# Draining.


def test_arrivals_wait_for_a_drain_and_what_runs_ends_as_ever() -> None:
    drive = Drive(kv_pages=20)
    drive.engine.submit(ask("a", PROMPT, 10))
    drive.steps(4)
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=30), "r", drain_s=60.0))
    drive.steps(2)
    assert drive.engine.rebuilds.state is RebuildState.SERVING, "it serves while it compiles"
    drive.on_the_side().steps()
    assert drive.engine.rebuilds.state is RebuildState.DRAINING
    drive.engine.submit(ask("b", (7, 8, 9), 4))
    drive.steps()
    assert not drive.has_started("b")
    drive.rest()
    assert done.result(0).current.kv == 30
    assert [stage for stage, _ in done.result(0).stages] == list(Stage)
    assert drive.tokens("a") == solo(PROMPT, 10)
    assert drive.tokens("b") == solo((7, 8, 9), 4)
    assert drive.engine.rebuilds.state is RebuildState.SERVING


def test_a_drain_that_takes_too_long_is_busy_and_opens_again() -> None:
    drive = Drive(kv_pages=20)
    drive.engine.submit(ask("a", PROMPT, 30))
    drive.steps(4)
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=30), "r", drain_s=2.0))
    drive.steps().on_the_side().steps()
    drive.clock.advance(2.0)
    drive.steps()
    refused = error(done)
    assert isinstance(refused, PoolsBusy)
    assert sizes(drive)[PoolKind.KV] == 20
    served(drive, "b")


def test_giving_up_stops_a_drain_unless_somebody_else_waits() -> None:
    drive = Drive(kv_pages=20)
    drive.engine.submit(ask("a", PROMPT, 10))
    drive.steps(4)
    wish = RebuildWish(PoolSizes(kv=30), "r", drain_s=60.0)
    first = drive.engine.rebuild(wish)
    drive.steps().on_the_side().steps()
    second = drive.engine.rebuild(wish)
    drive.steps()
    first.cancel()
    drive.steps()
    assert drive.engine.rebuilds.state is RebuildState.DRAINING
    second.cancel()
    drive.steps()
    assert drive.engine.rebuilds.state is RebuildState.SERVING
    third = drive.engine.rebuild(wish)
    drive.rest().on_the_side().steps(2)
    assert third.result(0).current.kv == 30


def test_the_same_id_joins_and_another_is_busy() -> None:
    drive = Drive(kv_pages=20)
    one = drive.engine.rebuild(RebuildWish(PoolSizes(kv=30), "r"))
    drive.steps()
    two = drive.engine.rebuild(RebuildWish(PoolSizes(kv=30), "r"))
    other = drive.engine.rebuild(RebuildWish(PoolSizes(kv=31), "s", drain_s=60.0))
    drive.steps()
    refused = error(other)
    assert isinstance(refused, PoolsBusy)
    assert refused.cause == "rebuild"
    drive.on_the_side().steps(2)
    assert one.result(0) is two.result(0)
    assert drive.engine.rebuilds.last_request_id == "r"


def test_a_stop_gives_a_rebuild_up() -> None:
    drive = Drive(kv_pages=20)
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=30), "r"))
    drive.steps()
    drive.engine.stop()
    assert error(done).reason == "SHUTTING_DOWN"


# Faults.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("site", "stage"), STAGES)
def test_a_fault_at_any_stage_is_undone(kind: str, site: Site, stage: Stage) -> None:
    failpoints = Failpoints()
    drive = Drive(kv_pages=24, failpoints=failpoints, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    served(drive, "before")
    before = sizes(drive)
    failpoints.armed[site] = 1.0
    failed = error(drive.rebuild(PoolSizes(kv=48)))
    failpoints.disarm()
    assert isinstance(failed, RebuildRolledBack)
    assert failed.stage == stage.value
    assert sizes(drive) == before
    assert drive.engine.rebuilds.state is RebuildState.SERVING
    assert served(drive, "after") == len(PROMPT) - 1
    assert drive.rebuild(PoolSizes(kv=48)).result(0).current.kv == 48
    assert served(drive, "then") == len(PROMPT) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_pools_without_memory_are_undone(kind: str) -> None:
    drive = Drive(kv_pages=24, **KINDS[kind])  # pyright: ignore[reportArgumentType] -- by name
    served(drive, "before")
    drive.runner.fail_allocations_with = [MemoryError("no memory")]
    failed = error(drive.rebuild(PoolSizes(kv=48)))
    assert isinstance(failed, RebuildRolledBack)
    assert failed.stage == "allocate"
    assert served(drive, "after") == len(PROMPT) - 1


def test_programs_that_do_not_compile_change_nothing() -> None:
    drive = Drive()
    drive.runner.fail_prepare_with = RuntimeError("the compiler gave up")
    failed = error(drive.rebuild(PoolSizes(kv=48)))
    assert isinstance(failed, RebuildRolledBack)
    assert failed.stage == "compile"
    served(drive, "after")


def test_a_rebuild_that_cannot_be_undone_ends_all_service() -> None:
    drive = Drive(kv_pages=24)
    served(drive, "before")
    drive.engine.submit(ask("running", PROMPT, 3))
    drive.steps()
    done = drive.engine.rebuild(RebuildWish(PoolSizes(kv=48), "r", drain_s=60.0))
    drive.steps().on_the_side().steps()
    drive.engine.submit(ask("queued", PROMPT, 3))
    drive.runner.fail_allocations_with = [MemoryError("no memory"), MemoryError("still none")]
    drive.rest()
    failed = error(done)
    assert isinstance(failed, RebuildFailed)
    assert failed.stage == "allocate"
    assert isinstance(drive.error("queued"), RebuildFailed)
    assert drive.engine.rebuilds.state is RebuildState.FAILED
    with pytest.raises(RebuildFailed):
        drive.engine.submit(ask("late"))
    with pytest.raises(RebuildFailed):
        drive.engine.rebuild(RebuildWish(PoolSizes(kv=24), "again"))
    drive.engine.stop()

"""Other sizes for the pools, while the server runs.

Refused by arithmetic before anything is touched. Then new programs are compiled on a thread of their
own while requests are served, admission closes, running requests end, and between two steps all that
is held is copied to host memory, the pools are replaced, and it is written back. A fault is undone
from the same copies. Knows no queue and no transport: what it needs of them it asks through its
doors. All but `state` and `last_request_id` is for the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

from engine.errors import EngineError
from engine.failpoints import Failpoints, Site
from engine.memory.errors import PoolsBusy, RebuildFailed, RebuildRolledBack, TooLarge
from engine.memory.pages import PageAllocator
from engine.memory.split import PoolSizes, Split, SplitShape, check_target
from engine.slots.forecast import forecast
from engine.slots.survivors import Copies, HeldState, Touched, let_go, renumber
from engine.slots.table import SlotTable
from engine.step import DeviceSizes, PoolLost, PreparedPools, Runner

_log = logging.getLogger(__name__)


class RebuildState(Enum):
    """What the pools are doing."""

    SERVING = "serving"
    DRAINING = "draining"
    REBUILDING = "rebuilding"
    FAILED = "failed"


class Stage(Enum):
    """A step of a rebuild, in order."""

    VALIDATE = "validate"
    COMPILE = "compile"
    DRAIN = "drain"
    COPY_OUT = "copy_out"
    FREE = "free"
    ALLOCATE = "allocate"
    COPY_BACK = "copy_back"
    WARM = "warm"


_SITES = {
    Stage.COMPILE: Site.REBUILD_COMPILE,
    Stage.COPY_OUT: Site.REBUILD_COPY_OUT,
    Stage.FREE: Site.REBUILD_FREE,
    Stage.ALLOCATE: Site.REBUILD_ALLOCATE,
    Stage.COPY_BACK: Site.REBUILD_COPY_BACK,
    Stage.WARM: Site.REBUILD_WARM,
}


@dataclass(frozen=True)
class RebuildWish:
    """What is asked for.

    `drain_s` is how long running requests may take to end, 0: not at all. `on_state` is called on
    the engine thread with every state that the rebuild brings about.
    """

    target: PoolSizes
    request_id: str
    drain_s: float = 0.0
    validate_only: bool = False
    on_state: Callable[[RebuildState], None] = field(default=lambda _: None, compare=False)


@dataclass(frozen=True)
class RebuildReport:
    """What a rebuild did or, with `validate_only`, would do.

    `erased_slot_ids` lost their tokens. `peak_bytes` are the most bytes in use at any moment: all
    that is fixed, the pools, and the copies on the host. `stages` are seconds, in order.
    """

    request_id: str
    previous: PoolSizes
    split: Split
    kept: HeldState
    dropped: HeldState
    peak_bytes: int
    elapsed_s: float
    stages: tuple[tuple[Stage, float], ...] = ()
    is_busy: bool = False

    @property
    def current(self) -> PoolSizes:
        """The sizes after it."""
        return self.split.sizes


@dataclass(frozen=True)
class RebuildDoors:
    """What a rebuild needs of the engine.

    `split` is what the pools share and their sizes now, `num_experts` how many are in memory.
    `num_rows` and `num_transfers` run now. `set_open` lets waiting work begin or not. `post` runs
    something on the engine thread, from any other; `start` runs something on another thread.
    `on_resized` is called with new sizes in force, `on_failed` once nothing can be served any more.
    `available_bytes` tells what the system still has where pools and copies lie, if it tells.
    """

    split: Callable[[], tuple[SplitShape, PoolSizes]]
    num_experts: Callable[[], int]
    num_rows: Callable[[], int]
    num_transfers: Callable[[], int]
    set_open: Callable[[bool], None]
    post: Callable[[Callable[[], None]], None]
    start: Callable[[Callable[[], None]], None]
    on_resized: Callable[[], None]
    on_failed: Callable[[], None]
    clock: Callable[[], float]
    available_bytes: Callable[[], int | None]


@dataclass(eq=False)
class _Job:
    """The rebuild that runs, and who waits for it."""

    wish: RebuildWish
    split: Split
    began_s: float
    waiters: list[Future[RebuildReport]]
    compiled: Future[PreparedPools] = field(default_factory=Future[PreparedPools])
    drains_until_s: float | None = None
    is_drained: bool = False
    times: dict[Stage, float] = field(default_factory=dict[Stage, float])
    stage: Stage = Stage.VALIDATE


class Rebuilds:
    """At most one rebuild at a time, of the pools of one engine."""

    def __init__(
        self,
        doors: RebuildDoors,
        runner: Runner,
        table: SlotTable,
        pages: PageAllocator,
        failpoints: Failpoints,
    ) -> None:
        self._doors = doors
        self._runner = runner
        self._table = table
        self._pages = pages
        self._failpoints = failpoints
        self._job: _Job | None = None
        self._done: list[tuple[list[Future[RebuildReport]], RebuildReport]] = []
        self.state = RebuildState.SERVING
        self.last_request_id = ""
        self.failed_in = ""

    @property
    def is_running(self) -> bool:
        """True from when a rebuild was accepted until it has ended."""
        return self._job is not None

    @property
    def has_work(self) -> bool:
        """True while the next step would go on with a rebuild."""
        job = self._job
        if job is None:
            return False
        # The last row may have ended in the step before, which nothing else announces.
        is_empty = job.drains_until_s is not None and not self._busy_cause()
        return is_empty or job.is_drained or _is_given_up(job)

    @property
    def next_deadline_s(self) -> float | None:
        """When the drain that runs ends at the latest."""
        return self._job.drains_until_s if self._job else None

    def ask(self, wish: RebuildWish, done: Future[RebuildReport]) -> None:
        """Begins a rebuild, joins the one of the same id, or refuses; `done` gets what comes of it.

        It raises PoolsBusy, NoSuchPool, BelowFloor, TooLarge, RebuildRolledBack or RebuildFailed.
        Until the pools are being replaced cancelling it stops the rebuild, unless others wait too.
        """
        if done.cancelled():
            return
        try:
            report = self._begin(wish, done)
        except EngineError as error:
            _fail([done], error)
        else:
            if report is not None:
                _answer([done], report)

    def run(self) -> None:
        """Goes on with the rebuild as far as it can now."""
        job = self._job
        if job is None:
            return
        if _is_given_up(job):
            self._end(job)
        elif job.is_drained:
            self._runner.give_back()  # what compiling left, before more is taken
            self._replace(job)
        elif job.drains_until_s is not None:
            self._drain(job)
        elif job.compiled.done():
            self._begin_drain(job)

    def tell(self) -> None:
        """Answers who waits for a rebuild that was done, now that everybody can see the new sizes."""
        done, self._done = self._done, []
        for waiters, report in done:
            _answer(waiters, report)
        if done:
            self._runner.give_back()  # the old programs are gone

    def stop(self, make_error: Callable[[], EngineError]) -> None:
        """Gives up a rebuild that has replaced nothing yet."""
        if self._job is not None:
            job = self._job
            self._end(job)
            _fail(job.waiters, make_error())

    # Refusals.

    def _begin(self, wish: RebuildWish, done: Future[RebuildReport]) -> RebuildReport | None:
        began_s, doors, job = self._doors.clock(), self._doors, self._job
        if self.state is RebuildState.FAILED:
            raise RebuildFailed(self.failed_in)
        if job is not None and wish.request_id == job.wish.request_id and not wish.validate_only:
            job.waiters.append(done)
            return None
        shape, current = doors.split()
        is_same = wish.target.over(current) == current
        if not wish.validate_only and not is_same:
            self._refuse_if_busy(wish)
        split = check_target(shape, current, wish.target)
        if not is_same:
            self._refuse_if_short(current, split)
        if wish.validate_only or is_same:
            return self._forecast(wish, current, split, began_s)
        self.last_request_id = wish.request_id
        self._job = job = _Job(wish, split, began_s, [done])
        job.times[Stage.VALIDATE] = doors.clock() - began_s
        doors.start(lambda: self._compile(job))
        return None

    def _refuse_if_busy(self, wish: RebuildWish) -> None:
        if self._job is not None:
            raise PoolsBusy("rebuild", self._doors.num_rows())
        cause = self._busy_cause()
        if cause and not wish.drain_s:
            raise PoolsBusy(cause, self._doors.num_rows())

    def _refuse_if_short(self, current: PoolSizes, split: Split) -> None:
        """The budget is not all: for a while there are copies, and the system may have no room."""
        available = self._doors.available_bytes()
        if available is None:
            return
        sizes = self._device_sizes(split.sizes)
        units = forecast(self._table, self._pages, sizes).units
        copied = self._bytes_of(units, Touched.of(self._device_sizes(current), sizes))
        shape, _ = self._doors.split()
        before = shape.fixed_bytes(current) + shape.needed_bytes(current)
        more = self._peak_bytes(current, split, copied) - before
        if more <= available:
            return
        raise TooLarge(
            needed_bytes=split.needed_bytes,
            budget_bytes=split.budget_bytes,
            fixed_bytes=split.fixed_bytes,
            sizes=tuple((kind.value, size) for kind, size in split.sizes.items()),
            more_bytes=more,
            available_bytes=available,
        )

    def _busy_cause(self) -> str:
        if self._doors.num_rows():
            return "requests"
        return "transfers" if self._doors.num_transfers() else ""

    def _forecast(
        self, wish: RebuildWish, current: PoolSizes, split: Split, began_s: float
    ) -> RebuildReport:
        seen = forecast(self._table, self._pages, self._device_sizes(split.sizes))
        num_experts = self._doors.num_experts()
        kept = min(num_experts, split.sizes.moe_cache or 0)
        touched = Touched.of(self._device_sizes(current), self._device_sizes(split.sizes))
        return RebuildReport(
            request_id=wish.request_id,
            previous=current,
            split=split,
            kept=replace(seen.kept, experts=kept),
            dropped=replace(seen.dropped, experts=num_experts - kept),
            peak_bytes=self._peak_bytes(current, split, self._bytes_of(seen.units, touched)),
            elapsed_s=self._doors.clock() - began_s,
            is_busy=self._job is not None or bool(self._busy_cause()),
        )

    def _device_sizes(self, sizes: PoolSizes) -> DeviceSizes:
        """The sizes as the runner takes them: pages are counted even where they have no bytes."""
        pages = self._pages.size if sizes.kv is None else sizes.kv
        return DeviceSizes(pages, sizes.swa or 0, sizes.mamba or 0, sizes.moe_cache or 0)

    def _bytes_of(self, units: DeviceSizes, touched: Touched) -> int:
        counts: dict[str, int] = {}
        if touched.pages:
            counts |= {"kv": units.kv, "swa": units.swa}
        if touched.states:
            counts["mamba"] = units.mamba
        pools = self._doors.split()[0].pools
        return sum(pool.unit_bytes * counts.get(pool.kind.value, 0) for pool in pools)

    def _peak_bytes(self, current: PoolSizes, split: Split, copied_bytes: int) -> int:
        shape, _ = self._doors.split()
        before = shape.fixed_bytes(current) + shape.needed_bytes(current)
        return max(before, split.fixed_bytes + split.needed_bytes) + copied_bytes

    # While serving.

    def _compile(self, job: _Job) -> None:
        """On a thread of its own."""
        try:
            prepared = self._runner.prepare(self._device_sizes(job.split.sizes))
        except BaseException as error:
            outcome = error
            self._doors.post(lambda: job.compiled.set_exception(outcome))
        else:
            self._doors.post(lambda: job.compiled.set_result(prepared))

    def _begin_drain(self, job: _Job) -> None:
        now_s = self._doors.clock()
        job.times[Stage.COMPILE] = now_s - job.began_s - job.times[Stage.VALIDATE]
        job.stage = Stage.COMPILE
        try:
            self._failpoints.check(Site.REBUILD_COMPILE)
            job.compiled.result()
        except Exception as error:
            self._roll_back(job, error)
            return
        job.stage = Stage.DRAIN
        job.drains_until_s = now_s + job.wish.drain_s
        self._doors.set_open(False)
        self._enter(job, RebuildState.DRAINING)
        self._drain(job)

    def _drain(self, job: _Job) -> None:
        now_s = self._doors.clock()
        cause = self._busy_cause()
        assert job.drains_until_s is not None
        if not cause:
            job.times[Stage.DRAIN] = now_s - (job.drains_until_s - job.wish.drain_s)
            # The next step replaces the pools; until then everybody can see what is coming.
            job.is_drained = True
            self._enter(job, RebuildState.REBUILDING)
        elif now_s >= job.drains_until_s:
            self._end(job)
            _fail(job.waiters, PoolsBusy(cause, self._doors.num_rows()))

    def _end(self, job: _Job) -> None:
        """Opens again."""
        assert job is self._job
        self._job = None
        self._doors.set_open(True)
        if self.state is not RebuildState.SERVING:
            self._enter(job, RebuildState.SERVING)

    def _enter(self, job: _Job, state: RebuildState) -> None:
        self.state = state
        job.wish.on_state(state)

    # Between two steps, with nothing running.

    def _replace(self, job: _Job) -> None:
        job.waiters = [done for done in job.waiters if done.set_running_or_notify_cancel()]
        (shape, current), before = self._doors.split(), self._held()
        try:
            split = check_target(shape, current, job.wish.target)
            self._refuse_if_short(current, split)
        except EngineError as error:
            self._end(job)
            _fail(job.waiters, error)
            return
        copies: Copies | None = None
        old: PreparedPools = self._runner.pools
        touched = Touched.of(old.sizes, self._device_sizes(split.sizes))
        try:
            copies = self._copy_out(job, touched)
            self._swap(job, job.compiled.result(), copies, touched)
        except Exception as error:
            self._undo(job, old, copies, touched, error)
            return
        self._doors.on_resized()
        # Those that were read to fill a larger pool were not kept.
        kept = self._held(at_most=before.experts)
        report = RebuildReport(
            request_id=job.wish.request_id,
            previous=current,
            split=split,
            kept=kept,
            dropped=before.without(kept),
            peak_bytes=self._peak_bytes(current, split, copies.nbytes),
            elapsed_s=self._doors.clock() - job.began_s,
            stages=tuple(job.times.items()),
        )
        self._end(job)
        self._done.append((job.waiters, report))

    def _held(self, at_most: int | None = None) -> HeldState:
        experts = self._doors.num_experts()
        experts = experts if at_most is None else min(experts, at_most)
        return replace(HeldState.of(self._table), experts=experts)

    def _copy_out(self, job: _Job, touched: Touched) -> Copies:
        with self._timed(job, Stage.COPY_OUT):
            let_go(self._table, self._pages, self._device_sizes(job.split.sizes))
            return Copies.read(self._table, self._pages, self._runner, touched)

    def _swap(self, job: _Job, prepared: PreparedPools, copies: Copies, touched: Touched) -> None:
        with self._timed(job, Stage.FREE):
            self._runner.free_pools(prepared)
        with self._timed(job, Stage.ALLOCATE):
            self._runner.allocate_pools(prepared)
        renumber(self._table, self._pages, prepared.sizes, touched)
        with self._timed(job, Stage.COPY_BACK):
            copies.write(self._runner)
        with self._timed(job, Stage.WARM):
            self._runner.warm()

    @contextmanager
    def _timed(self, job: _Job, stage: Stage) -> Generator[None]:
        """Measures a stage, in whose midst a test can let it fail."""
        began_s, job.stage = self._doors.clock(), stage
        yield
        self._failpoints.check(_SITES[stage])
        job.times[stage] = self._doors.clock() - began_s

    def _undo(
        self,
        job: _Job,
        old: PreparedPools,
        copies: Copies | None,
        touched: Touched,
        error: Exception,
    ) -> None:
        """Goes back to the old sizes; without copies nothing was freed yet."""
        if copies is not None:
            try:
                self._runner.free_pools(old)
                self._runner.allocate_pools(old)
                renumber(self._table, self._pages, old.sizes, touched)
                copies.write(self._runner)
            except Exception as second:
                self._latch(job, second)
                return
        is_copied = copies is not None and touched.pages and (touched.states or not old.sizes.mamba)
        if isinstance(error, PoolLost) and not is_copied:
            # What was not to be touched went with it.
            self._table.empty_all()
        self._roll_back(job, error)

    def _roll_back(self, job: _Job, error: Exception) -> None:
        _log.error("a rebuild failed in stage %s, undone", job.stage.value, exc_info=error)
        self._end(job)
        fault = RebuildRolledBack(job.stage.value)
        fault.__cause__ = error
        _fail(job.waiters, fault)

    def _latch(self, job: _Job, error: Exception) -> None:
        _log.critical("the pools are lost: a rebuild was not undone", exc_info=error)
        self._job = None
        self.failed_in = job.stage.value
        self._enter(job, RebuildState.FAILED)
        self._doors.on_failed()
        fault = RebuildFailed(job.stage.value)
        fault.__cause__ = error
        _fail(job.waiters, fault)


def _is_given_up(job: _Job) -> bool:
    return all(done.cancelled() for done in job.waiters)


def _answer(waiters: list[Future[RebuildReport]], report: RebuildReport) -> None:
    for done in waiters:
        if done.running() or done.set_running_or_notify_cancel():
            done.set_result(report)


def _fail(waiters: list[Future[RebuildReport]], error: EngineError) -> None:
    for done in waiters:
        if done.running() or done.set_running_or_notify_cancel():
            done.set_exception(error)

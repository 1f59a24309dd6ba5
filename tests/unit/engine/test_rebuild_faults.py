"""Every step of a rebuild fails in every way, for every pool, under a running and a queued stream.

Whatever happens: sizes are the old or the new ones, both streams say what they would have said alone,
and the engine serves. Only a fault while another is undone ends service.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from engine.failpoints import Failpoints, Site
from engine.memory.errors import PoolsBusy, RebuildFailed, RebuildRolledBack
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport, RebuildState, RebuildWish
from engine.types import PoolKind
from tests.fake_runner import EXPERTS
from tests.unit.engine.drive import Drive, ask, solo

STEPS = [
    Site.REBUILD_COMPILE,
    Site.REBUILD_COPY_OUT,
    Site.REBUILD_FREE,
    Site.REBUILD_ALLOCATE,
    Site.REBUILD_COPY_BACK,
    Site.REBUILD_WARM,
]
# What the model has, and sizes to go to, smaller and larger.
POOLS = {
    PoolKind.KV: ({"kv_pages": 40}, 30, 60),
    PoolKind.SWA: ({"window": 8}, None, 40),
    PoolKind.MAMBA: ({"mamba_slots": 6}, 3, 9),
    PoolKind.MOE_CACHE: ({"num_experts": 8}, EXPERTS.floor, EXPERTS.ceiling),
}
CAUSES = ["exception", "memory", "cancel", "deadline"]
PROMPT, OTHER = tuple(range(10, 40)), tuple(range(50, 70))


class AtStep(Failpoints):
    """Does something once, when a step is about to end."""

    def __init__(self, step: Site, act: Callable[[], None]) -> None:
        super().__init__()
        self._step, self._act = step, act
        self.is_due = False
        self.has_acted = False

    def check(self, site: Site) -> None:
        if site is self._step and self.is_due:
            self.is_due = False
            self.has_acted = True
            self._act()


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("grows", [False, True], ids=["shrinks", "grows"])
@pytest.mark.parametrize("kind", list(POOLS), ids=lambda kind: kind.value)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.value)
def test_a_step_that_fails(step: Site, kind: PoolKind, grows: bool, cause: str) -> None:
    config, less, more = POOLS[kind]
    asked: list[Future[RebuildReport]] = []
    acts: dict[str, Callable[[], object]] = {
        "exception": lambda: fail(RuntimeError("the device went")),
        "memory": lambda: fail(MemoryError("no memory")),
        "cancel": lambda: asked[0].cancel(),
        "deadline": lambda: drive.clock.advance(1000.0),
    }

    def act() -> None:
        acts[cause]()

    point = AtStep(step, act)
    drive = Drive(failpoints=point, **config)  # pyright: ignore[reportArgumentType] -- by name
    size = more if grows else less
    if size is None:
        size = drive.pool(kind).floor
        drive.rebuild(PoolSizes(swa=size + 5)).result(0)
    old = drive.pool(kind).size
    assert size != old
    drive.engine.submit(ask("running", PROMPT, 12))
    drive.steps(4)
    point.is_due = True
    target = PoolSizes(**{kind.value: size})
    asked.append(drive.engine.rebuild(RebuildWish(target, "r", drain_s=60.0)))
    drive.steps().on_the_side().steps()
    drive.engine.submit(ask("queued", OTHER, 6))
    drive.rest()
    assert point.has_acted
    assert drive.tokens("running") == solo(PROMPT, 12, drive.runner.window)
    assert drive.tokens("queued") == solo(OTHER, 6, drive.runner.window)
    assert drive.engine.rebuilds.state is RebuildState.SERVING
    check_outcome(asked[0], step, cause)
    is_new = not asked[0].cancelled() and asked[0].exception(0) is None
    assert drive.pool(kind).size == (size if is_new else old)
    assert drive.rebuild(target, request_id="again").result(0).current.get(kind) == size


def check_outcome(done: Future[RebuildReport], step: Site, cause: str) -> None:
    """Faults are undone; who gives up stops what has replaced nothing; time ends only the drain."""
    if cause in ("exception", "memory"):
        error = done.exception(0)
        assert isinstance(error, RebuildRolledBack)
        assert error.stage == step.value.removeprefix("rebuild.")
    elif cause == "cancel":
        assert done.cancelled() == (step is Site.REBUILD_COMPILE)
        assert done.cancelled() or done.result(0)
    elif step is Site.REBUILD_COMPILE:
        # The drain began before the time was gone.
        assert isinstance(done.exception(0), PoolsBusy)
    else:
        assert done.result(0)


@pytest.mark.parametrize("kind", list(POOLS), ids=lambda kind: kind.value)
def test_time_that_runs_out_in_the_drain_is_busy_and_changes_nothing(kind: PoolKind) -> None:
    config, _, more = POOLS[kind]
    drive = Drive(**config)  # pyright: ignore[reportArgumentType] -- by name
    old = drive.pool(kind).size
    drive.engine.submit(ask("running", PROMPT, 25))
    drive.steps(4)
    wish = RebuildWish(PoolSizes(**{kind.value: more}), "r", drain_s=1.0)
    done = drive.engine.rebuild(wish)
    drive.steps().on_the_side().steps()
    drive.clock.advance(2.0)
    drive.rest()
    assert isinstance(done.exception(0), PoolsBusy)
    assert drive.pool(kind).size == old
    assert drive.tokens("running") == solo(PROMPT, 25, drive.runner.window)


@pytest.mark.parametrize("kind", list(POOLS), ids=lambda kind: kind.value)
@pytest.mark.parametrize("step", STEPS[2:], ids=lambda step: step.value)
def test_only_a_second_fault_ends_service(step: Site, kind: PoolKind) -> None:
    config, _, more = POOLS[kind]
    point = AtStep(step, lambda: fail(RuntimeError("the device went")))
    drive = Drive(failpoints=point, **config)  # pyright: ignore[reportArgumentType] -- by name
    drive.engine.submit(ask("before", PROMPT, 3))
    drive.rest()
    allocate = drive.runner.allocate_pools

    def fail_when_undone(target: object) -> None:
        if point.has_acted:
            raise MemoryError("no memory")
        allocate(target)  # pyright: ignore[reportArgumentType] -- as given

    drive.runner.allocate_pools = fail_when_undone  # pyright: ignore[reportAttributeAccessIssue] -- a fault
    point.is_due = True
    done = drive.rebuild(PoolSizes(**{kind.value: more}))
    assert isinstance(done.exception(0), RebuildFailed)
    assert drive.engine.rebuilds.state is RebuildState.FAILED
    with pytest.raises(RebuildFailed):
        drive.engine.submit(ask("late"))

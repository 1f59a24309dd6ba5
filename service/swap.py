"""Another model in the place of the one that is served: checked, loaded, switched, or taken back.

Where memory has room for both the new model is loaded beside the old one, which serves until the
new one does. Otherwise the old one ends its requests and goes first; if the new one then cannot be
loaded the old one is loaded again. Everything here runs on the event loop but loading itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.adapters.errors import AdapterFileNotFound
from engine.adapters.kept import KeptAdapters
from engine.adapters.source import resolve_inside
from engine.errors import EngineError, NotSupported, ShuttingDown
from engine.rebuild import RebuildState
from service.bridge import Bridge
from service.load_watch import LoadWatch
from service.loaded import LoadedModel
from service.metrics import Metrics
from service.model_loader import LoadPlan, LoadStage, ModelLoader, ModelOrder
from service.swap_errors import (
    ModelFileNotFound,
    ModelInUse,
    ModelLost,
    ModelRolledBack,
    ModelSwapBusy,
    ModelTooLarge,
)
from service.tenure import Tenure

Result = TypeVar("Result")
_LOG = logging.getLogger("kvarts.service")
# For a load that is to end at a stop: the time of its next look around.
_END_S = 0.1


@dataclass(frozen=True)
class SwapWish:
    """Which model, by its path below the folder, and how; times are seconds.

    `drain_s` None waits for running requests as long as they take.
    """

    path: str
    validates_only: bool = False
    replaces_first: bool = False
    drain_s: float | None = None


@dataclass(frozen=True)
class Swapped:
    """What came of it: the model that is served, and for how long none was."""

    model: LoadedModel
    plan: LoadPlan
    is_beside: bool
    elapsed_s: float
    unavailable_s: float = 0.0
    num_left: int = 0


@dataclass(frozen=True)
class SwapHooks:
    """What the server does at each turn: readiness, the new model's figures, the end of service.

    `on_leaving` is of a model that no call uses any more, whose engine still runs.
    """

    set_ready: Callable[[bool], Awaitable[None]]
    on_served: Callable[[LoadedModel], Awaitable[None]]
    on_leaving: Callable[[LoadedModel], Awaitable[None]]
    on_gone: Callable[[LoadedModel], None]
    on_lost: Callable[[], Awaitable[None]]


class ModelSwap:
    """Changes the model of one server; one change at a time."""

    def __init__(
        self,
        bridge: Bridge,
        metrics: Metrics,
        hooks: SwapHooks,
        make_loader: Callable[[], ModelLoader],
        folder: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` is where models may come from, None for nowhere; `clock` is in seconds."""
        self._bridge = bridge
        self._metrics = metrics
        self._hooks = hooks
        self._make_loader = make_loader
        self._folder = folder
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_possible(self) -> bool:
        """Whether models may be loaded at all."""
        return self._folder is not None

    def begin(self, wish: SwapWish, watch: LoadWatch) -> asyncio.Task[Swapped]:
        """Changes the model in the background; see `give_up`.

        The task raises EngineError: it was refused or failed, and which model is served then, the
        error says. Whatever else it raises is a fault of ours, and the old model serves.
        """
        task = self._spawn(self._counted(wish, watch))
        task.add_done_callback(lambda _: watch.end())
        return task

    def give_up(self, task: asyncio.Task[Swapped], watch: LoadWatch) -> None:
        """Stops a change whose caller went away, unless the old model was let go already."""
        if not watch.is_committed:
            task.cancel()

    async def stop(self) -> None:
        """Ends what runs, for the end of the server: nothing is brought back."""
        # The second time it does not even wait for the thread that loads.
        for _ in range(2):
            tasks = {task for task in self._tasks if task.cancel()}
            if tasks:
                await asyncio.wait(tasks, timeout=_END_S)

    async def _counted(self, wish: SwapWish, watch: LoadWatch) -> Swapped:
        if self._folder is None:
            raise NotSupported("another model: the server has no --model-dir")
        if wish.validates_only:
            return await self._swap(wish, watch, Path(self._folder))
        with self._metrics.model_swap():
            try:
                return await self._swap(wish, watch, Path(self._folder))
            except EngineError as error:
                _LOG.error("model %r is not served: %s", wish.path[:255], error)
                raise

    async def _swap(self, wish: SwapWish, watch: LoadWatch, folder: Path) -> Swapped:
        began_s = self._clock()
        with self._bridge.changes.swap():
            loader = self._make_loader()
            watch.show(LoadStage.CHECK)
            kept = _kept(self._bridge.model)
            path = await asyncio.to_thread(_resolve, folder, wish.path)
            order = ModelOrder(path, kept, named=wish.path)
            plan = await asyncio.to_thread(loader.check, order)
            if plan.least_bytes > plan.limit_bytes:
                raise ModelTooLarge(wish.path, plan.least_bytes, plan.limit_bytes)
            is_beside = plan.fits_beside and not wish.replaces_first
            unavailable_s, num_left = 0.0, 0
            if wish.validates_only:
                pass
            elif is_beside:
                num_left = await self._beside(loader, order, watch)
            else:
                unavailable_s = await self._in_place(loader, order, watch, wish.drain_s)
            return Swapped(
                self._bridge.model,
                plan,
                is_beside,
                elapsed_s=self._clock() - began_s,
                unavailable_s=unavailable_s,
                num_left=num_left,
            )

    async def _beside(self, loader: ModelLoader, order: ModelOrder, watch: LoadWatch) -> int:
        """Returns how many calls go on on the old model."""
        model = await self._load(loader, order, watch)
        old = self._bridge.serve(model)
        assert old is not None
        num_left = old.num_users
        _LOG.info("%s is served; %d calls go on on the old model", model.names.path, num_left)
        self._spawn(self._retire(loader, old))
        await self._hooks.on_served(model)
        return num_left

    async def _in_place(
        self, loader: ModelLoader, order: ModelOrder, watch: LoadWatch, drain_s: float | None
    ) -> float:
        """Returns for how many seconds nothing was served: from the last call's end on.

        Calls that arrive from the drain on wait, and run on what is served then.
        """
        old = self._bridge.suspend()
        try:
            await self._hooks.set_ready(False)
            watch.show(LoadStage.DRAIN)
            await _drained(old, drain_s)
        except BaseException:
            self._bridge.resume(old)
            await self._hooks.set_ready(True)
            raise
        # From here on nothing is served unless this goes on, so only a stop ends it.
        watch.commit()
        closed_s = self._clock()
        back = _as_it_was(old.model)
        try:
            await self._retire(loader, old)
            await self._replace(loader, order, back, watch)
        finally:
            # Whoever still waits then waits for nothing.
            self._bridge.lose()
        return self._clock() - closed_s

    async def _replace(
        self, loader: ModelLoader, order: ModelOrder, back: ModelOrder, watch: LoadWatch
    ) -> None:
        try:
            await self._serve(await self._load(loader, order, watch))
        except ShuttingDown:
            raise
        except Exception as error:
            detail = _told(error)
            _LOG.exception("%s cannot be loaded; the old model is loaded again", order.path)
        else:
            return
        watch.show(LoadStage.ROLL_BACK)
        try:
            # The failure held what had been loaded until here.
            await asyncio.to_thread(loader.release)
            await self._serve(await self._load(loader, back, watch))
        except ShuttingDown:
            raise
        except Exception as error:
            _LOG.critical("the old model cannot be loaded again", exc_info=error)
            await self._hooks.on_lost()
            raise ModelLost(order.path.name, detail) from error
        raise ModelRolledBack(order.path.name, detail)

    async def _load(self, loader: ModelLoader, order: ModelOrder, watch: LoadWatch) -> LoadedModel:
        """Loads on a thread; cancelled, it ends there first, so that two never load at once."""
        building = asyncio.ensure_future(
            self._bridge.build(lambda sink: loader.load(order, sink, watch))
        )
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            watch.give_up()
            await asyncio.wait((building,))
            if not building.cancelled() and building.exception() is None:
                building.result().close()
            raise

    async def _serve(self, model: LoadedModel) -> None:
        self._bridge.serve(model)
        _LOG.info("%s is served", model.names.path)
        await self._hooks.on_served(model)
        await self._hooks.set_ready(True)

    async def _retire(self, loader: ModelLoader, tenure: Tenure) -> None:
        """Lets a model go once no call uses it; whoever holds the tenure holds no memory of it."""
        await tenure.unused()
        await self._hooks.on_leaving(tenure.model)
        await self._bridge.retire(tenure)
        model = tenure.end()
        self._hooks.on_gone(model)
        await asyncio.to_thread(model.close)
        del model
        await asyncio.to_thread(loader.release)

    def _spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waited has it; where nobody did it must not be lost.
            level = logging.DEBUG if isinstance(error, EngineError) else logging.ERROR
            _LOG.log(level, "a change of the model ended", exc_info=error)


def _kept(model: LoadedModel) -> KeptAdapters:
    if model.engine.rebuilds.state is not RebuildState.SERVING:
        raise ModelSwapBusy("pools are being changed")
    return model.engine.adapters.kept()


def _resolve(folder: Path, path: str) -> Path:
    """Returns the real place of a file below the folder.

    Raises:
        PathOutsideRoot: The path, or a link, leads out.
        ModelFileNotFound: There is no file there.
    """
    try:
        found = resolve_inside(folder, path)
    except AdapterFileNotFound:
        raise ModelFileNotFound(path) from None
    if not found.is_file():
        raise ModelFileNotFound(path)
    return found


def _as_it_was(model: LoadedModel) -> ModelOrder:
    """How to load a model again: under its names, with its adapters and pools."""
    engine = model.engine
    _, sizes = engine.pools.split()
    return ModelOrder(
        Path(model.names.path), engine.adapters.kept(), names=model.names, sizes=sizes
    )


async def _drained(old: Tenure, drain_s: float | None) -> None:
    try:
        async with asyncio.timeout(drain_s):
            await old.unused()
    except TimeoutError:
        raise ModelInUse(old.num_users) from None


def _told(error: Exception) -> str:
    """What a caller is told of why a model cannot be loaded; the log has all of it."""
    return str(error) if isinstance(error, EngineError) else f"it failed ({type(error).__name__})"

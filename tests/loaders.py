"""A loader of models that are fakes: each file's content is the number of tokens that it says.

Example:
    loader = FakeLoader(tmp_path)
    loader.write("b.gguf", token=7)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.adapters.content import Pair, make_content
from engine.adapters.kept import KeptAdapters
from engine.adapters.loaded import NewAdapter
from engine.engine import Engine
from engine.errors import ModelFileError
from engine.memory.planner import plan_memory
from engine.types import EngineConfig, EventSink
from service.loaded import LoadedModel, ModelNames
from service.model_loader import LoadPlan, LoadStage, ModelOrder, OnProgress
from tests.contract.serving import CONFIG, fake_model
from tests.fake_runner import FakeRunner
from tests.fakes import fake_engine, fake_shape, fitting_runner
from tests.slot_stores import fake_store

ROOMY = LoadPlan(needed_bytes=10, least_bytes=5, limit_bytes=100, available_bytes=50)
TIGHT = replace(ROOMY, available_bytes=5)


@dataclass
class FakeLoader:
    """Loads from a folder, and fails where it is told to.

    `fails` maps what is done, "check" or "load", and a file's name to what is raised, one after
    another. `gate` holds each load back until it is set. `config` is every engine's.
    """

    folder: Path
    plan: LoadPlan = ROOMY
    config: EngineConfig = CONFIG
    num_adapters: int = 2
    slot_folder: Path | None = None
    fails: dict[tuple[str, str], list[Exception]] = field(
        default_factory=dict[tuple[str, str], list[Exception]]
    )
    gate: threading.Event | None = None
    orders: list[ModelOrder] = field(default_factory=list[ModelOrder])
    engines: list[Engine] = field(default_factory=list[Engine])
    closed: list[str] = field(default_factory=list[str])
    num_released: int = 0

    def write(self, name: str, token: int) -> Path:
        path = self.folder / name
        path.write_text(str(token))
        return path

    def check(self, order: ModelOrder) -> LoadPlan:
        self._maybe_fail("check", order.path.name)
        self._token(order.path)
        return self.plan

    def load(self, order: ModelOrder, sink: EventSink, on_progress: OnProgress) -> LoadedModel:
        self.orders.append(order)
        on_progress(LoadStage.WEIGHTS, 0, 100)
        if self.gate is not None:
            assert self.gate.wait(30)
        on_progress(LoadStage.WEIGHTS, 100, 100)
        self._maybe_fail("load", order.path.name)
        token = self._token(order.path)
        device = fitting_runner(plan_memory(self.config, fake_shape(), 1 << 20))
        device.next_token = lambda history: token
        return self.describe(order, self._engine(sink, device, order.kept), device)

    def describe(self, order: ModelOrder, engine: Engine, device: FakeRunner) -> LoadedModel:
        path = order.path
        names = order.names or ModelNames(model_id=path.name, path=str(path))
        plan = plan_memory(self.config, fake_shape(), 1 << 20)
        store = None
        if self.slot_folder is not None:
            store = fake_store(
                self.slot_folder,
                device,
                plan,
                lambda: engine.snapshot().adapters,
                weights=path.read_text(),
            )
        return fake_model(
            engine,
            names=names,
            slot_store=store,
            close=lambda: self.closed.append(path.name),
        )

    def release(self) -> None:
        self.num_released += 1

    def _engine(self, sink: EventSink, device: FakeRunner, kept: KeptAdapters) -> Engine:
        engine = fake_engine(
            sink, config=self.config, runner=device, num_adapters=self.num_adapters
        )
        engine.adapters.attach(_again(kept), next_id=kept.next_id)
        self.engines.append(engine)
        return engine

    def _maybe_fail(self, what: str, name: str) -> None:
        errors = self.fails.get((what, name))
        if errors:
            raise errors.pop(0)

    def _token(self, path: Path) -> int:
        try:
            return int(path.read_text())
        except ValueError:
            raise ModelFileError(path.name, "is no model") from None


def _again(kept: KeptAdapters) -> Sequence[NewAdapter]:
    values = np.zeros((2, 4), np.float32)
    content = make_content({"blk.0.attn_q.weight": Pair(values, values, "f32", 1.0)})
    return [
        NewAdapter(one.name, one.path, one.scale, content, one.source, one.adapter_id)
        for one in kept.adapters
    ]

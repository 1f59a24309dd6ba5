"""What the scheduler is given, and hands on to its saves and restores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.adapters.effective import SetMember, make_set
from engine.adapters.loaded import LoadedAdapters
from engine.errors import EngineError, EngineFault
from engine.failpoints import Failpoints
from engine.generation import ChainFactory, TextFactory, TokenText
from engine.memory.prefix_index import PrefixRoot
from engine.model.scoring import ScoringHead
from engine.requests import Request
from engine.scheduling.restoring import TransferParts
from engine.slots.engine_calls import EngineCalls
from engine.slots.manifest import AdapterMark
from engine.step import Runner


@dataclass(frozen=True)
class SchedulerParts:
    """What the scheduler is given. `chunk_tokens` bounds the prompt tokens of one step.

    `shifts`: a full context loses tokens in its middle, instead of ending the request.
    `prefix_root` says what a request's prefixes must agree in before their tokens are compared.
    `clock` is monotonic, in seconds. `draw_seed` makes the seed of a request that names none, in
    0 .. 2^32 - 1; `new_error_id` names a fault, so that a client's report finds the log line.
    `start_file_work` runs something on another thread, which asks for work here through `calls`.
    `head` scores texts, where the model has one.
    """

    runner: Runner
    tokenizer: TokenText
    begin_chain: ChainFactory
    begin_text: TextFactory
    prefix_root: Callable[[Request, bytes], PrefixRoot]
    adapters: LoadedAdapters
    clock: Callable[[], float]
    draw_seed: Callable[[], int]
    new_error_id: Callable[[], str]
    chunk_tokens: int
    calls: EngineCalls
    start_file_work: Callable[[Callable[[], None]], None]
    shifts: bool = False
    head: ScoringHead | None = None
    failpoints: Failpoints = field(default_factory=Failpoints)

    def seed_of(self, request: Request) -> int:
        """Returns the effective seed of a request."""
        seed = request.sampling.seed
        return self.draw_seed() if seed is None else seed

    def as_engine_error(self, cause: Exception) -> EngineError:
        """Returns an engine's error as it is and anything else as a fault with a new id."""
        if isinstance(cause, EngineError):
            return cause
        fault = EngineFault(self.new_error_id())
        fault.__cause__ = cause
        return fault

    def for_transfers(self, on_pool_lost: Callable[[], None]) -> TransferParts:
        """Returns what saves and restores need of it."""
        return TransferParts(
            store=self.runner,
            calls=self.calls,
            start=self.start_file_work,
            clock=self.clock,
            as_engine_error=self.as_engine_error,
            root_of=self._root_of,
            on_pool_lost=on_pool_lost,
        )

    def _root_of(self, tenant: str, adapters: tuple[AdapterMark, ...]) -> PrefixRoot:
        """The root under which a tenant's requests with a set of adapters will look."""
        members = (SetMember(0, 0, bytes.fromhex(m.content), m.scale) for m in adapters)
        return self.prefix_root(Request("", (), tenant=tenant), make_set(members).key)

"""What an engine is made of, and what its scheduler is given of that."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.adapters.desk import NO_ADAPTERS, AdapterSetup
from engine.adapters.loaded import LoadedAdapters
from engine.failpoints import Failpoints
from engine.generation import ChainFactory, TextFactory, TokenText
from engine.memory.planner import MemoryPlan
from engine.memory.split import MemoryLimits
from engine.model.scoring import ScoringHead
from engine.scheduling.parts import SchedulerParts
from engine.side_threads import FileThreads, start_on_thread
from engine.slots.engine_calls import EngineCalls
from engine.slots.prefixes import prefix_root
from engine.step import Runner
from engine.types import EngineConfig, ExpertFigures, PoolInfo
from engine.validation import RequestLimits


def _draw_seed() -> int:
    # 2^32 - 1 means "random" to llama.cpp's clients, so it is never an effective seed.
    return random.SystemRandom().randrange(2**32 - 1)


def _new_error_id() -> str:
    return uuid.uuid4().hex


def _untold() -> int | None:
    return None


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of; tests replace any of it.

    `clock` is monotonic, in seconds. `model_id` is the model's fingerprint, with which every prefix
    key begins. `start_file_work` runs the file side of a save or a restore on another thread, `start_compiling`
    what compiles the programs of a rebuild.
    `experts` tells how the moe_cache pool of a model that has one stands, `memory` what all pools
    have to fit into. `head` scores texts, where the model has one. `available_bytes` tells what the
    system still has where pools lie, None where it does not tell.
    """

    runner: Runner
    tokenizer: TokenText
    begin_chain: ChainFactory
    begin_text: TextFactory
    adapters: AdapterSetup = NO_ADAPTERS
    clock: Callable[[], float] = time.monotonic
    draw_seed: Callable[[], int] = _draw_seed
    new_error_id: Callable[[], str] = _new_error_id
    model_id: bytes = b""
    start_file_work: Callable[[Callable[[], None]], None] = field(default_factory=FileThreads)
    start_compiling: Callable[[Callable[[], None]], None] = start_on_thread
    failpoints: Failpoints = field(default_factory=Failpoints)
    experts: Callable[[], tuple[PoolInfo, ExpertFigures]] | None = None
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    head: ScoringHead | None = None
    available_bytes: Callable[[], int | None] = _untold


def request_limits(config: EngineConfig, plan: MemoryPlan, parts: EngineParts) -> RequestLimits:
    """What an engine of these parts refuses a request for."""
    return RequestLimits(
        num_slots=config.num_slots,
        vocab_size=parts.tokenizer.vocab_size,
        context_tokens=plan.slot_context_tokens,
        kv_pages=plan.kv_pages,
        page_tokens=plan.page_tokens,
        chunk_tokens=min(config.chunk_tokens, parts.runner.max_chunk),
        embeds=config.embeds,
        is_encoder=parts.runner.max_texts > 0,
        has_head=parts.head is not None,
    )


def scheduler_parts(
    config: EngineConfig, parts: EngineParts, loaded: LoadedAdapters, calls: EngineCalls
) -> SchedulerParts:
    """What the scheduler of an engine of these parts is given."""
    return SchedulerParts(
        runner=parts.runner,
        tokenizer=parts.tokenizer,
        begin_chain=parts.begin_chain,
        begin_text=parts.begin_text,
        prefix_root=partial(prefix_root, model=parts.model_id, kv_dtype=config.kv_dtype),
        adapters=loaded,
        clock=parts.clock,
        draw_seed=parts.draw_seed,
        new_error_id=parts.new_error_id,
        chunk_tokens=config.chunk_tokens,
        calls=calls,
        start_file_work=parts.start_file_work,
        shifts=config.context_shift,
        head=parts.head,
        failpoints=parts.failpoints,
    )

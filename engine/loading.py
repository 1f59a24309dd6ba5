"""From a GGUF file to an engine that can be started: the one place that puts the parts together.

Example:
    loaded = load_engine("model.gguf", EngineConfig(context_tokens=512), sink=print)
    loaded.engine.start()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.desk import AdapterSetup
from engine.adapters.fit import TargetModel
from engine.adapters.kept import KeptAdapters
from engine.adapters.loaded import NewAdapter
from engine.adapters.room import check_bank_room
from engine.adapters.start import capacity_for, read_start_adapters
from engine.budget import fit_budget
from engine.compile_cache import enable_compile_cache
from engine.devices import choose_device
from engine.engine import Engine
from engine.engine_parts import EngineParts
from engine.errors import InvalidField, UnsupportedModel
from engine.footprint import Footprint, footprint
from engine.gguf.facts import FileFacts, read_facts
from engine.gguf.reader import GgufFile
from engine.gguf.sampling import SamplingHints, read_sampling
from engine.gguf.vocab import Vocab, read_vocab
from engine.kernels import native
from engine.memory.available import available_bytes
from engine.memory.expert_store import ExpertShape
from engine.memory.heap import give_back
from engine.memory.planner import KvShape, MemoryPlan, plan_memory
from engine.memory.split import MemoryLimits, floors_of, shape_of, sizes_of, with_sizes
from engine.model.adapter_banks import target_model
from engine.model.architectures import read_spec
from engine.model.expert_pool import expert_shape
from engine.model.moving import can_move
from engine.model.scoring import read_head
from engine.model.spec import ModelSpec
from engine.model.tensors import check_tensors
from engine.model.weights import Weights, load_weights
from engine.requests import Request
from engine.runner import JaxRunner, RunnerConfig
from engine.sampling.chain import Chain
from engine.sampling.vocab import SamplerVocab
from engine.slots.fingerprint import digest_weights, traits_of
from engine.slots.hash_cache import HashCache
from engine.slots.identity import Identity, ModelSource
from engine.slots.state_layout import StateLayout
from engine.text.load import load_tokenizer
from engine.text.stream import TextStream
from engine.text.tokenizer import Tokenizer
from engine.threads import limit_threads
from engine.types import EngineConfig, EventSink, ExpertFigures, PoolInfo, PoolKind

COMPILE_BYTES = 192 << 20
"""What XLA takes while it compiles a model's programs two at a time, measured."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadProgress:
    """How far loading is: `stage` is "weights", "experts" (bytes) or "compile" (programs)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """A model in memory, all programs compiled; `engine` is not started yet.

    `runner` is the engine's own: only who never starts the engine may run steps on it. `identity`
    has not begun to hash.
    """

    engine: Engine
    tokenizer: Tokenizer
    vocab: Vocab
    spec: ModelSpec
    facts: FileFacts
    hints: SamplingHints
    plan: MemoryPlan
    runner: JaxRunner
    weights: Weights
    identity: Identity


def load_engine(
    path: str | os.PathLike[str],
    config: EngineConfig,
    sink: EventSink,
    *,
    pre_override: str | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    kept: KeptAdapters | None = None,
    resident_bytes: Callable[[], int] | None = None,
    **parts: Any,
) -> Loaded:
    """Loads a model, compiles its programs and builds the engine around them.

    Args:
        path: A GGUF file, or any file of a split one.
        config: Sizes; `context_tokens` 0 means the model's training context.
        sink: Receives all events, on the engine thread.
        pre_override: Pre-tokenizer to use instead of the one that the file names.
        progress: Called as weights are read and programs become ready.
        kept: Adapters of another engine, in the place of those of `config`.
        resident_bytes: Tells what the process takes now. With it a memory budget on a CPU is one of
            the whole process: the interpreter, the compiler and the prefixes that the host keeps.
        parts: Replacements of `EngineParts` fields (clock, seeds, failpoints), for tests.

    Raises:
        ModelFileError: The file is damaged.
        UnsupportedModel: The model, or its tokenizer, is not one that this build runs.
        InvalidField: A size of `config` is out of range, or its device or kernels cannot be had.
        EngineError: An adapter of `config` cannot be attached; the message names file and tensor.
    """
    report = progress or _ignore
    if kept is not None:
        config = kept.config(config)
    if config.threads is not None:
        limit_threads(config.threads)
    choose_device(config.device)
    is_native = choose_kernels(config.kernels)
    if config.compile_cache:
        _keep_programs(config.compile_cache)
    with GgufFile.open(path) as file:
        front = _read_front(file, config)
        spec, facts, hints = front.spec, front.facts, front.hints
        plan, vocab = front.plan, front.vocab
        digest = digest_weights(file)
        source = ModelSource(file.stamps, tuple(file.tensors.values()))
        # The tokenizer is built in the interpreter while numpy fills the arena and XLA compiles.
        with ThreadPoolExecutor(1) as side:
            tokenizing = side.submit(_load_texts, vocab, facts, pre_override)
            shape = expert_shape(spec, file, is_native=is_native)
            has_budget = config.memory_budget is not None
            weights = load_weights(
                spec,
                file,
                lambda done, total: report(LoadProgress("weights", done, total)),
                is_native=is_native,
                # Under a budget they get their memory when all else is known.
                expert_slots=shape.floor if shape and has_budget else config.moe_cache_slots,
                overlaps=config.prefill_overlap,
            )
            head = read_head(spec, file)
            expert_pool = _expert_pool(weights)
            if tokenizing.done():
                tokenizing.result()  # a refusal need not wait for the compiler
            model = target_model(spec)
            adapters = _read_adapters(config, kept, model)
            capacity = capacity_for(config, adapters, model)
            limits = _memory_limits(config, spec, _fixed_bytes(weights))
            experts = expert_pool()[0] if expert_pool else None
            smallest = with_sizes(plan, floors_of(plan)) if has_budget else plan
            check_bank_room(
                shape_of(smallest, limits, experts),
                sizes_of(smallest, experts.size if experts else None),
                capacity,
                capacity.nbytes(model.matrices.values()),
            )
            process_bytes = 0
            if has_budget:
                if resident_bytes is not None:
                    tokenizing.result()  # a part of what is measured
                    process_bytes = _process_bytes(config, resident_bytes(), weights)
                fitted = fit_budget(
                    config,
                    spec,
                    plan,
                    weights,
                    _runner_config,
                    capacity,
                    _counting(report, shape),
                    process_bytes,
                )
                plan, weights = fitted.plan, fitted.weights
                del fitted  # the probe
            give_back()  # what reading took; pools take its place
            runner = JaxRunner(spec, weights, _runner_config(config, plan, capacity))
            runner.warm_up(lambda done, total: report(LoadProgress("compile", done, total)))
            tokenizer, sampler_vocab = tokenizing.result()
    limits = _memory_limits(config, spec, runner.fixed_bytes, process_bytes)
    replaced: dict[str, Any] = {"memory": limits} | parts
    if jax.default_backend() == "cpu":  # elsewhere copies lie in another memory than pools
        replaced = {"available_bytes": available_bytes} | replaced
    engine_parts = EngineParts(
        runner=runner,
        tokenizer=tokenizer,
        begin_chain=_chain_factory(sampler_vocab),
        begin_text=TextStream,
        adapters=AdapterSetup(runner, capacity, replace(model, takes_experts=capacity.has_experts)),
        model_id=digest.sampled.encode(),
        experts=expert_pool,
        head=head,
        **replaced,
    )
    give_back()
    engine = Engine(config, plan, engine_parts, sink=sink)
    engine.adapters.attach(adapters, next_id=kept.next_id if kept else 0)
    identity = Identity(
        traits_of(digest, spec, _state_layout(runner, plan), plan.slot_context_tokens),
        digest,
        source,
        HashCache(Path(config.identity_cache)) if config.identity_cache else None,
        model_name=facts.name,
    )
    return Loaded(engine, tokenizer, vocab, spec, facts, hints, plan, runner, weights, identity)


@dataclass(frozen=True)
class Checked:
    """What a file says of a model that this build runs, and what it will take.

    `limit_bytes` is all that the engine may take.
    """

    spec: ModelSpec
    plan: MemoryPlan
    vocab: Vocab
    footprint: Footprint
    limit_bytes: int


def check_engine(
    path: str | os.PathLike[str],
    config: EngineConfig,
    *,
    pre_override: str | None = None,
    kept: KeptAdapters | None = None,
) -> Checked:
    """Refuses what `load_engine` would refuse before it reads weights or compiles anything.

    Args:
        path: As in `load_engine`.
        config: The same; every adapter of it is read whole.
        pre_override: The same.
        kept: The same.

    Raises:
        EngineError: As `load_engine`.
    """
    if kept is not None:
        config = kept.config(config)
    with GgufFile.open(path) as file:
        front = _read_front(file, config)
        spec = front.spec
        check_tensors(spec, file)
        _load_texts(front.vocab, front.facts, pre_override)
        model = target_model(spec)
        capacity = capacity_for(config, _read_adapters(config, kept, model), model)
        experts = expert_shape(spec, file, is_native=choose_kernels(config.kernels))
        sums = footprint(
            front.plan,
            weights_bytes=front.facts.size_bytes,
            bank_bytes=capacity.nbytes(model.matrices.values()),
            experts=experts,
            num_experts=config.moe_cache_slots,
        )
        limit_bytes = _memory_limits(config, spec, 0).limit_bytes
        return Checked(spec, front.plan, front.vocab, sums, limit_bytes)


def _read_adapters(
    config: EngineConfig, kept: KeptAdapters | None, model: TargetModel
) -> Sequence[NewAdapter]:
    return read_start_adapters(config, model) if kept is None else kept.read(model)


@dataclass(frozen=True)
class _Front:
    """What a model's file says before any weight is read, and the plan that follows."""

    spec: ModelSpec
    facts: FileFacts
    hints: SamplingHints
    plan: MemoryPlan
    vocab: Vocab


def _read_front(file: GgufFile, config: EngineConfig) -> _Front:
    spec, facts = read_spec(file), read_facts(file)
    hints = read_sampling(file.metadata)
    if spec.encoder is not None and (config.adapters or config.max_adapters):
        raise InvalidField("adapters", f"a {spec.architecture} model takes none (--lora)")
    if config.context_shift and not can_move(spec):
        raise InvalidField("context_shift", f"keys of {spec.architecture} cannot be moved")
    plan = plan_memory(config, _kv_shape(spec), spec.context_train)
    vocab = read_vocab(file.metadata)
    _check_vocab(file.name, spec, vocab)
    return _Front(spec, facts, hints, plan, vocab)


def choose_kernels(wanted: str) -> bool:
    """Returns whether the native kernels are used.

    Args:
        wanted: "native", "xla", or "auto", which takes the native ones on a CPU where they were
            built and warns where they were not.

    Raises:
        InvalidField: They were asked for and cannot be had, or `wanted` is none of these.
    """
    if wanted not in ("auto", "native", "xla"):
        raise InvalidField("kernels", f"must be auto, native or xla, got {wanted!r}")
    if wanted == "xla":
        return False
    has_cpu = jax.default_backend() == "cpu"
    if has_cpu and native.isa() is not None:
        return True
    if wanted == "native":
        why = native.why_missing() if has_cpu else "run on a CPU only"
        raise InvalidField("kernels", f"the native kernels {why}")
    if has_cpu:
        _log.warning(
            "the native kernels %s: products run on XLA, several times slower",
            native.why_missing(),
        )
    return False


def _expert_pool(weights: Weights) -> Callable[[], tuple[PoolInfo, ExpertFigures]] | None:
    """How the moe_cache pool stands; None where the model has no experts."""
    if weights.experts is None:
        return None
    store = weights.experts.pool.store
    return lambda: (store.pool_info(), store.figures)


def _counting(
    report: Callable[[LoadProgress], None], shape: ExpertShape | None
) -> Callable[[int], None]:
    """Reports experts as they are read under a budget, in bytes of memory at most."""
    total = shape.ceiling * shape.slot_bytes if shape else 0
    done = 0

    def on_read(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        report(LoadProgress("experts", done, total))

    return on_read


def _process_bytes(config: EngineConfig, resident_bytes: int, weights: Weights) -> int:
    """What a budget of the whole process has to leave beside arrays, of which the weights are there.

    Nothing is compiled yet: what that takes would depend on the programs that a folder keeps. Memory
    of an accelerator is none of the process's.

    Raises:
        InvalidField: The host's part has no limit.
    """
    if jax.default_backend() != "cpu":
        return 0
    if config.host_cache_bytes is None:
        raise InvalidField(
            "host_cache_bytes", "prefixes on the host need a limit where memory has a budget"
        )
    held = _fixed_bytes(weights)
    if weights.experts is not None:
        pool = weights.experts.pool
        held += pool.num_slots * pool.shape.slot_bytes
    return max(0, resident_bytes - held) + COMPILE_BYTES + config.host_cache_bytes


def _memory_limits(
    config: EngineConfig, spec: ModelSpec, fixed_bytes: int, process_bytes: int = 0
) -> MemoryLimits:
    """What there is: the budget, else all of the device's memory, else of the machine's.

    `fixed_bytes` are those of arrays that no pool's size changes.
    """
    if config.memory_budget is not None:
        return MemoryLimits(spec.architecture, fixed_bytes, config.memory_budget, process_bytes)
    stats = cast("dict[str, int]", jax.devices()[0].memory_stats() or {})
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = stats.get("bytes_limit", machine)
    return MemoryLimits(spec.architecture, fixed_bytes, limit_bytes)


def _fixed_bytes(weights: Weights) -> int:
    """Of all but experts, which are a pool."""
    return sum(array.nbytes for array in jax.tree.leaves(replace(weights, experts=None)))


def _keep_programs(folder: str) -> None:
    try:
        enable_compile_cache(folder)
    except OSError as error:
        # A read-only home costs time at each start, not the start.
        _log.warning("compiled programs are not kept: %s", error)


def _ignore(_: LoadProgress) -> None:
    pass


def _kv_shape(spec: ModelSpec) -> KvShape:
    kv = spec.kv
    return KvShape(
        num_layers=spec.num_full_layers,
        num_kv_heads=kv.num,
        key_dim=kv.key_dim,
        value_dim=kv.value_dim,
        num_window_layers=spec.num_window_layers,
        window=spec.window or 0,
        state_bytes=spec.num_recurrent_layers * (spec.state.nbytes if spec.state else 0),
    )


def _runner_config(
    config: EngineConfig, plan: MemoryPlan, adapters: AdapterCapacity
) -> RunnerConfig:
    return RunnerConfig(
        max_rows=config.num_slots,
        max_chunk=min(config.chunk_tokens, plan.slot_context_tokens),
        context_tokens=plan.slot_context_tokens,
        num_pages=plan.kv_pages,
        page_tokens=plan.page_tokens,
        kv_dtype=config.kv_dtype,
        num_window_pages=plan.window.pages if plan.window else 0,
        adapters=adapters,
        num_states=plan.states.states if plan.states else 0,
        embeds=config.embeds,
    )


def _state_layout(runner: JaxRunner, plan: MemoryPlan) -> StateLayout:
    window = runner.page_layout(PoolKind.SWA) if plan.window else None
    window_tokens = plan.window.window if plan.window else 0
    return StateLayout.of(
        runner.page_layout(PoolKind.KV), window, window_tokens, runner.state_layout
    )


def _check_vocab(name: str, spec: ModelSpec, vocab: Vocab) -> None:
    """Every row of the embedding must be a token, or ids without a text could be sampled."""
    if len(vocab.tokens) != spec.vocab_size:
        raise UnsupportedModel(
            name, f"the tokenizer has {len(vocab.tokens)} tokens, the embedding {spec.vocab_size}"
        )


def _load_texts(
    vocab: Vocab, facts: FileFacts, pre_override: str | None
) -> tuple[Tokenizer, SamplerVocab]:
    tokenizer = load_tokenizer(
        vocab,
        pre_override=pre_override,
        model_name=facts.name,
        architecture=facts.architecture,
    )
    end = vocab.eot_token if vocab.eot_token is not None else vocab.eos_token
    sampler_vocab = SamplerVocab.of(
        tokenizer, end_of_turn=end, suppressed_tokens=frozenset(vocab.suppress_tokens)
    )
    return tokenizer, sampler_vocab


def _chain_factory(sampler_vocab: SamplerVocab) -> Callable[[Request, int], Chain]:
    def begin(request: Request, seed: int) -> Chain:
        prompt: Sequence[int] = request.prompt
        return Chain(
            request.sampling,
            vocab=sampler_vocab,
            prompt=prompt,
            seed=seed,
            ignore_eos=request.ignore_eos,
            constraint=request.constraint.begin() if request.constraint else None,
            reasoning=request.reasoning,
        )

    return begin

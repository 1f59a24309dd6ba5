"""From the command line's options to a model that is ready to serve: fetch, load, describe.

Blocking; `service.bridge` runs it on a thread.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax

from engine.devices import available_memory
from engine.errors import InvalidField
from engine.loading import Loaded, LoadProgress, check_engine, load_engine
from engine.memory.heap import forget_programs
from engine.memory.resident import resident_bytes
from engine.requests import Pooling
from engine.slots.store import SlotStore
from engine.text.chat_template import ChatTemplate
from engine.text.pairs import pair_layout
from engine.text.tokenizer import Tokenizer
from engine.text.turn_template import TurnTemplate
from engine.types import EngineConfig, EventSink
from service.defaults import EmbeddingDefaults, with_hints
from service.fetch.progress import ProgressLine
from service.fetch.source import resolve_model
from service.loaded import LoadedModel, ModelFacts, ModelNames
from service.model_loader import LoadPlan, LoadStage, ModelOrder, OnProgress
from service.options import EmbeddingOptions, ServiceOptions
from service.template import file_template, open_template, try_file_template

_LOG = logging.getLogger("kvarts.service")

# What a load takes beyond weights and pools: a share of them, and compiling.
_SPARE_PARTS = 10
# Between two lines of one stage of a load.
_QUIET_S = 2.0
_COMPILE_BYTES = 256 << 20

_SPECIAL = (
    "bos",
    "eos",
    "eot",
    "unk",
    "sep",
    "pad",
    "mask",
    "fim_pre",
    "fim_suf",
    "fim_mid",
    "fim_pad",
    "fim_rep",
    "fim_sep",
)


def load_named(options: ServiceOptions, sink: EventSink) -> LoadedModel:
    """Fetches the model that the options name, unless it is there, and loads it.

    Raises:
        service.fetch.errors.FetchError: It cannot be had.
        ModelFileError: The file is damaged.
        UnsupportedModel: This build does not run it.
        InvalidField: A size of the layout is out of range, or the device is not there.
        TemplateError: The model's chat template is none.
    """
    path = resolve_model(options.model, say=_LOG.info, progress=ProgressLine(sys.stderr))
    _LOG.info("loading %s", path)
    loaded = load_engine(
        path,
        options.engine,
        sink,
        pre_override=options.pre_override,
        progress=LoadReport(),
        resident_bytes=resident_bytes,
    )
    model = _describe(options, loaded, _names(options, path))
    # None of a served model is garbage, and a full collection that looked through its 150,000
    # objects (Gemma 3) would hold every stream up for 80 ms.
    gc.freeze()
    return model


class Loader:
    """Loads models in the place of the start's, under all its other flags."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options

    def check(self, order: ModelOrder) -> LoadPlan:
        """Looks at file, sizes, adapters, tokenizer and template; see `ModelLoader.check`."""
        options = self._options
        checked = check_engine(
            order.path, _layout(options, order), pre_override=options.pre_override, kept=order.kept
        )
        try_file_template(
            options.chat_template,
            checked.vocab,
            checked.spec.num_layers,
            use_jinja=options.use_jinja,
        )
        needed_bytes = checked.footprint.needed_bytes
        return LoadPlan(
            needed_bytes=needed_bytes + needed_bytes // _SPARE_PARTS + _COMPILE_BYTES,
            least_bytes=checked.footprint.least_bytes,
            limit_bytes=checked.limit_bytes,
            # A budget is of one model: the one that is served has all of it.
            available_bytes=None if options.engine.memory_budget else available_memory(),
        )

    def load(self, order: ModelOrder, sink: EventSink, on_progress: OnProgress) -> LoadedModel:
        """Loads a model; see `ModelLoader.load`."""
        _LOG.info("loading %s", order.path)
        report = LoadReport()

        def progress(now: LoadProgress) -> None:
            report(now)
            on_progress(LoadStage(now.stage), now.done, now.total)

        loaded = load_engine(
            order.path,
            _layout(self._options, order),
            sink,
            pre_override=self._options.pre_override,
            progress=progress,
            kept=order.kept,
            resident_bytes=resident_bytes,
        )
        model = _describe(self._options, loaded, order.names or _names_of(self._options, order))
        gc.freeze()
        return model

    def release(self) -> None:
        """Collects what a model left; a collection of frozen objects finds nothing."""
        gc.unfreeze()
        forget_programs()
        gc.freeze()


class LoadReport:
    """Logs each stage of a load at its end, and before that its tenths where it takes long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins a load; `clock` tells seconds."""
        self._clock = clock
        self._shown = ("", 0)
        self._told_s = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        """Takes how far a stage is."""
        now_s = self._clock()
        stage, shown = self._shown
        if stage != progress.stage:
            stage, shown, self._told_s = progress.stage, 0, now_s
        tenth = progress.done * 10 // max(1, progress.total)
        self._shown = (stage, shown)
        if tenth == shown or (tenth < 10 and now_s - self._told_s < _QUIET_S):
            return
        self._shown, self._told_s = (stage, tenth), now_s
        _LOG.info("%s: %d %%", stage, tenth * 10)


def _layout(options: ServiceOptions, order: ModelOrder) -> EngineConfig:
    sizes = order.sizes
    if sizes is None or options.engine.memory_budget is not None:
        return options.engine
    return replace(
        options.engine,
        kv_pages=sizes.kv,
        swa_pages=sizes.swa,
        mamba_slots=sizes.mamba,
        moe_cache_slots=sizes.moe_cache,
    )


def _close(loaded: Loaded) -> None:
    loaded.runner.close()
    if loaded.weights.experts is not None:
        loaded.weights.experts.pool.close()


def _describe(options: ServiceOptions, loaded: Loaded, names: ModelNames) -> LoadedModel:
    template = _template(options, loaded)
    model = LoadedModel(
        slot_store=_slot_store(options, loaded),
        engine=loaded.engine,
        tokenizer=loaded.tokenizer,
        template=template,
        names=names,
        facts=_facts(loaded, template, _tool_use_template(options, loaded)),
        defaults=with_hints(options.defaults, loaded.hints, given=options.sampling_given),
        is_unified=options.engine.unified,
        has_context_shift=options.engine.context_shift,
        has_jinja=options.use_jinja,
        device=jax.default_backend(),
        embedding=_embedding(options.embedding, loaded),
        pairs=pair_layout(loaded.vocab, loaded.tokenizer),
        vocabulary=loaded.identity.traits.tokenizer,
        close=partial(_close, loaded),
    )
    if model.defaults.grammar:
        model.grammars.compile(model.defaults.grammar)
    return model


# llama.cpp's numbers.
_POOLINGS = (Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST, Pooling.RANK)


def _embedding(options: EmbeddingOptions | None, loaded: Loaded) -> EmbeddingDefaults | None:
    """The flag's pooling, else the file's, else none.

    Raises:
        InvalidField: The flag asks for scores, and the model has no head that makes them.
    """
    if options is None:
        return None
    own, has_head = loaded.facts.pooling_type, loaded.spec.scoring is not None
    if options.pooling is Pooling.RANK and not has_head:
        raise InvalidField("pooling", "rank (--reranking): the model has no classification head")
    pooling = options.pooling
    if pooling is None:
        pooling = _POOLINGS[own] if own is not None and own < len(_POOLINGS) else Pooling.NONE
        pooling = Pooling.NONE if pooling is Pooling.RANK and not has_head else pooling
    return EmbeddingDefaults(pooling=pooling, norm=options.norm)


def _slot_store(options: ServiceOptions, loaded: Loaded) -> SlotStore | None:
    if options.slot_save_path is None:
        return None
    return SlotStore(
        options.slot_save_path,
        loaded.identity,
        vocab_size=loaded.tokenizer.vocab_size,
        context_tokens=loaded.plan.slot_context_tokens,
        adapters=lambda: loaded.engine.snapshot().adapters,
        limit_bytes=options.slot_save_limit_bytes,
    )


def _names_of(options: ServiceOptions, order: ModelOrder) -> ModelNames:
    """Aliases of the start name whatever is served, else it is called as it was asked for."""
    return _named(options, order.path, order.named)


def _names(options: ServiceOptions, path: Path) -> ModelNames:
    """The name shown is the alphabetically first alias, else what was named at start."""
    return _named(options, path, options.model.hf_repo or options.model.path or path.stem)


def _named(options: ServiceOptions, path: Path, named: str) -> ModelNames:
    aliases = tuple(sorted(options.aliases))
    return ModelNames(
        model_id=aliases[0] if aliases else named,
        path=str(path),
        aliases=aliases,
        tags=options.tags,
    )


def _template(options: ServiceOptions, loaded: Loaded) -> ChatTemplate | TurnTemplate:
    """The flag's template (a source, or a built-in's name), else the file's, else ChatML."""
    vocab, tokenizer = loaded.vocab, loaded.tokenizer
    return open_template(
        options.chat_template
        or file_template(
            vocab.chat_template, vocab.chat_templates, vocab.pre, loaded.spec.num_layers
        ),
        _text(tokenizer, tokenizer.bos_token),
        _text(tokenizer, tokenizer.eos_token),
        adds_bos=tokenizer.add_bos,
        adds_eos=tokenizer.add_eos,
        use_jinja=options.use_jinja,
    )


def _tool_use_template(options: ServiceOptions, loaded: Loaded) -> str:
    """The file's separate template for tools; the flag's template stands for both."""
    return "" if options.chat_template else loaded.vocab.chat_templates.get("tool_use", "")


def _text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.pieces[token_id].decode("utf-8", "replace")


def _facts(
    loaded: Loaded, template: ChatTemplate | TurnTemplate, tool_use_template: str
) -> ModelFacts:
    spec, facts, tokenizer = loaded.spec, loaded.facts, loaded.tokenizer
    ids: dict[str, int | None] = {name: getattr(tokenizer.special, name) for name in _SPECIAL}
    special = {
        name: (token_id, _text(tokenizer, token_id))
        for name, token_id in ids.items()
        if token_id is not None
    }
    return ModelFacts(
        architecture=facts.architecture,
        vocab_type=tokenizer.kind.value,
        context_train_tokens=spec.context_train,
        embedding_size=spec.width,
        num_layers=spec.num_layers,
        num_params=facts.num_params,
        size_bytes=facts.size_bytes,
        name=facts.name,
        ftype=facts.file_type,
        special_tokens=special,
        chat_template=template.source,
        tool_use_template=tool_use_template,
        chat_capabilities={
            name.removeprefix("supports_"): holds for name, holds in asdict(template.caps).items()
        },
        has_infill_tokens=all(name in special for name in ("fim_pre", "fim_suf", "fim_mid")),
    )

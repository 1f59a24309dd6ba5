"""--check-config: looks at all that a start would use, serves nothing and fetches nothing.

Flags, keys and certificates were checked when the options were made of them. What is left are the
model with its plan, its tokenizer and template, the adapters and the folders.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.devices import choose_device
from engine.errors import EngineError
from engine.loading import check_engine
from service.fetch.errors import FetchError
from service.fetch.source import resolve_model
from service.options import ServiceOptions
from service.template import try_file_template


class BadConfig(Exception):
    """What would end, or cripple, a start; the message names it."""


def run_check(program: str, options: ServiceOptions) -> int:
    """Prints what was found, or why a start would fail; returns the exit status."""
    try:
        lines = check(options)
    except (BadConfig, EngineError, FetchError) as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        return 1
    sys.stdout.write("".join(f"{program}: {line}\n" for line in (*lines, "all is well")))
    return 0


def check(options: ServiceOptions) -> Sequence[str]:
    """Returns what a start would serve, one fact a line.

    Raises:
        BadConfig: A folder cannot be used.
        FetchError: The model is not there; nothing is fetched for a check.
        EngineError: The model, its template, an adapter or a size is refused.
    """
    _check_folders(options)
    path = resolve_model(replace(options.model, is_offline=True), say=_unsaid, progress=_unsaid)
    choose_device(options.engine.device)
    checked = check_engine(path, options.engine, pre_override=options.pre_override)
    spec, plan = checked.spec, checked.plan
    try_file_template(
        options.chat_template, checked.vocab, spec.num_layers, use_jinja=options.use_jinja
    )
    return (
        f"model: {path} ({spec.architecture}, {spec.num_layers} layers)",
        f"slots: {options.engine.num_slots} of {plan.slot_context_tokens} tokens",
        f"pool kv: {plan.kv_pages} pages of {plan.page_tokens} tokens",
        f"adapters: {len(options.engine.adapters)}",
        _compile_cache(options.engine.compile_cache),
    )


def _unsaid(*_: object) -> None:
    """Nothing is fetched, so there is nothing to tell."""


def _check_folders(options: ServiceOptions) -> None:
    saves, adapters = options.slot_save_path, options.adapter_dir
    if saves is not None and not os.access(saves, os.R_OK | os.W_OK | os.X_OK):
        raise BadConfig(f"--slot-save-path {saves}: cannot be written")
    if adapters is not None and not os.access(adapters, os.R_OK | os.X_OK):
        raise BadConfig(f"--lora-dir {adapters}: cannot be read")


def _compile_cache(folder: str | None) -> str:
    """A folder that is not there yet is made at a start, in the nearest one that is."""
    if folder is None:
        return "compiled programs: not kept"
    nearest = Path(folder)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return f"compiled programs: kept in {folder}"
    return f"compiled programs: not kept, {folder} cannot be written"

"""The files that a command line names: looked at before anything listens or loads."""

from __future__ import annotations

from pathlib import Path

from service.flags import FlagError
from service.options import ServiceOptions


def refuse_missing(options: ServiceOptions) -> None:
    """Finds out what a start would only find out once it listens.

    Raises:
        FlagError: A model or an adapter is not there, or is none by its kind; names flag and path.
    """
    source = options.model
    if source.path and source.hf_repo:
        raise FlagError("-m and -hf both name a model: give one of them")
    if source.path:
        _refuse_model(Path(source.path))
    for adapter in options.engine.adapters:
        # A folder is one of peft.
        if not Path(adapter.path).exists():
            raise FlagError(f"--lora {adapter.path}: no such file")


def _refuse_model(path: Path) -> None:
    if path.is_dir():
        raise FlagError(f"-m {path}: is a folder, where a .gguf file is wanted")
    if not path.exists():
        raise FlagError(f"-m {path}: no such file")

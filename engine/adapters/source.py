"""Where an adapter comes from: a GGUF file or a peft folder, named freely or below one folder."""

from __future__ import annotations

from pathlib import Path

from engine.adapters.content import AdapterContent
from engine.adapters.errors import AdapterFileInvalid, AdapterFileNotFound, PathOutsideRoot
from engine.adapters.fit import TargetModel
from engine.adapters.gguf_file import read_gguf_adapter
from engine.adapters.peft import CONFIG, WEIGHTS, read_peft_adapter


def read_adapter(path: Path, model: TargetModel, max_rank: int) -> AdapterContent:
    """Reads and checks an adapter, whichever form it has.

    Raises:
        EngineError: AdapterFileNotFound, AdapterFileInvalid, AdapterMismatch or RankTooLarge.
    """
    try:
        if path.is_dir():
            return read_peft_adapter(path, model, max_rank)
        return read_gguf_adapter(path, model, max_rank)
    except (OSError, ValueError) as error:
        # What a path can be wrong in before it is opened: too long, a loop, a forbidden folder.
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise AdapterFileInvalid(path.name[:255], f"cannot be read: {reason}") from error


def resolve_adapter(root: Path, path: str) -> Path:
    """Returns the real place of an adapter below `root`; the files of a folder lie there too.

    Raises:
        PathOutsideRoot: The path, or a link of its own or of a file in it, leads out.
        AdapterFileNotFound: There is nothing there.
    """
    found = resolve_inside(root, path)
    if found.is_dir():
        for name in (CONFIG, WEIGHTS):
            resolve_inside(root, f"{path}/{name}")
    return found


def resolve_inside(root: Path, path: str) -> Path:
    """Returns the real place of `path`, which must lie below `root` once every link is followed.

    Raises:
        PathOutsideRoot: It is absolute, climbs, or a link leads out.
        AdapterFileNotFound: There is nothing there.
    """
    if "\0" in path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise PathOutsideRoot(path)
    try:
        home = root.resolve(strict=True)
        found = (home / path).resolve(strict=True)
    except FileNotFoundError as error:
        raise AdapterFileNotFound(path) from error
    except (OSError, RuntimeError) as error:
        # A loop of links, a file in a folder's place, a name that is too long.
        raise AdapterFileNotFound(path) from error
    if found == home or not found.is_relative_to(home):
        raise PathOutsideRoot(path)
    return found

"""Paths below the adapter folder: nothing outside it is ever opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.adapters.errors import AdapterFileNotFound, PathOutsideRoot
from engine.adapters.peft import CONFIG, WEIGHTS
from engine.adapters.source import resolve_adapter, resolve_inside


@pytest.fixture(name="root")
def make_root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a.gguf").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"s")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "sub")
    (root / "loop").symlink_to(root / "loop")
    return root


@pytest.mark.parametrize("path", ["sub/a.gguf", "./sub/a.gguf", "in/a.gguf", "sub"])
def test_inside(root: Path, path: str) -> None:
    assert resolve_inside(root, path).is_relative_to(root.resolve())


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "sub/../../secret",
        "sub/../sub/a.gguf",
        "/etc/passwd",
        "out",
        "up/secret",
        ".",
        "",
        "a\0b",
    ],
)
def test_outside(root: Path, path: str) -> None:
    with pytest.raises(PathOutsideRoot):
        resolve_inside(root, path)


@pytest.mark.parametrize(
    "path", ["gone", "sub/a.gguf/x", "loop", "x" * 300, "up/gone", "sub\uff0f.."]
)
def test_absent(root: Path, path: str) -> None:
    with pytest.raises(AdapterFileNotFound):
        resolve_inside(root, path)


def test_files_of_a_folder_lie_inside_too(root: Path) -> None:
    """A link in a folder that is inside may lead out."""
    folder = root / "sub"
    with pytest.raises(AdapterFileNotFound):
        resolve_adapter(root, "sub")
    (folder / CONFIG).write_bytes(b"{}")
    (folder / "blob").write_bytes(b"x")
    (folder / WEIGHTS).symlink_to("blob")
    assert resolve_adapter(root, "sub") == folder.resolve()
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(root.parent / "secret")
    with pytest.raises(PathOutsideRoot, match=CONFIG):
        resolve_adapter(root, "sub")
    assert resolve_adapter(root, "sub/a.gguf").name == "a.gguf"

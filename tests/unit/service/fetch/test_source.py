from __future__ import annotations

import io
from pathlib import Path

import pytest

from service.fetch import FetchError, ProgressLine, resolve_model
from service.fetch.wheel_model import SMOLLM2
from service.options import ModelSource


def _source(tmp_path: Path, **changes: object) -> ModelSource:
    fields: dict[str, object] = {
        "path": None,
        "hf_repo": None,
        "hf_file": None,
        "is_offline": True,
        "cache_dir": tmp_path / "cache",
        "hub_dir": tmp_path / "hub",
    }
    return ModelSource(**(fields | changes))  # pyright: ignore[reportArgumentType] - test kwargs


def _resolve(source: ModelSource) -> Path:
    return resolve_model(source, say=lambda line: None, progress=lambda done, total: None)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert _resolve(_source(tmp_path, path=str(file))) == file


@pytest.mark.parametrize(("name", "cause"), [("none.gguf", "no such file"), (".", "is a folder")])
def test_no_such_file(tmp_path: Path, name: str, cause: str) -> None:
    with pytest.raises(FetchError, match=cause):
        _resolve(_source(tmp_path, path=str(tmp_path / name)))


def test_two_models_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="give one of them"):
        _resolve(_source(tmp_path, path="a", hf_repo="a/b"))


def test_a_repository_offline(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="a/b is not in the cache"):
        _resolve(_source(tmp_path, hf_repo="a/b"))


def test_nothing_named_is_the_default_model(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=SMOLLM2.file_name):
        _resolve(_source(tmp_path))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_a_line_per_ten_percent() -> None:
    out = io.StringIO()
    line = ProgressLine(out)
    for done in range(0, 101):
        line(done << 20, 100 << 20)
    assert len(out.getvalue().splitlines()) == 11


def test_progress_on_a_terminal_rewrites_its_line() -> None:
    out = _Terminal()
    line = ProgressLine(out)
    line(1 << 20, 2 << 20)
    line(2 << 20, 2 << 20)
    line(1 << 20, None)
    assert out.getvalue() == "\r1.0 of 2.0 MiB (50 %)\r2.0 of 2.0 MiB (100 %)\n"

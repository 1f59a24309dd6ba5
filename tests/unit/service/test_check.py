"""--check-config: what a start would serve, or the one line that says why it would fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from service.check import check, run_check
from service.command_line import service_command_line
from service.options import ServiceOptions
from tests.adapters import TinyAdapter, write_adapter
from tests.ggufs import write_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf")


def told(tmp_path: Path, *words: str) -> ServiceOptions:
    environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return service_command_line(["--check-config", *words], environ)


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_check("kvarts-service", told(tmp_path, *words)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def test_what_a_start_would_serve(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = told(tmp_path, "-m", str(model), "-c", "512", "-np", "2")
    assert options.checks_only
    assert run_check("kvarts-service", options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"kvarts-service: model: {model} (llama, ")
    assert "kvarts-service: slots: 2 of 256 tokens" in lines
    assert lines[-1] == "kvarts-service: all is well"
    # Nothing was made: neither a cache of programs nor one of hashes.
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["-m", "{folder}/none.gguf"], "none.gguf: no such file"),
        (["-m", "{folder}/damaged.gguf"], "damaged.gguf"),
        (["-m", "{model}", "--lora", "{folder}/none.gguf"], "none.gguf"),
        (["-m", "{model}", "--lora", "{folder}/misfit.gguf"], "misfit.gguf"),
        (["-hf", "someone/something"], "someone/something"),
        ([], "offline"),
    ],
)
def test_what_would_end_a_start_is_named(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    cause: str,
) -> None:
    (tmp_path / "damaged.gguf").write_bytes(model.read_bytes()[:200])
    weight = "blk.0.attn_q.weight"
    write_adapter(tmp_path / "misfit.gguf", TinyAdapter(rank=2), {weight: (3, 5)}, (weight,))
    filled = [word.format(folder=tmp_path, model=model) for word in words]
    assert cause in refused(tmp_path, capsys, *filled)


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()

    # Whoever runs the tests may be root, who can write everywhere.
    def is_another(path: object, mode: int) -> bool:
        return str(path) != str(saves)

    monkeypatch.setattr("os.access", is_another)
    words = ("-m", str(model), "--slot-save-path", str(saves))
    assert f"--slot-save-path {saves}: cannot be written" in refused(tmp_path, capsys, *words)


def test_programs_that_will_not_be_kept_are_told(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: object, mode: int) -> bool:
        return False

    monkeypatch.setattr("os.access", never)
    assert f"compiled programs: not kept, {tmp_path}/cache/kvarts/xla cannot be written" in check(
        told(tmp_path, "-m", str(model))
    )

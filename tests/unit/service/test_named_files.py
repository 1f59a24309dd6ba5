from __future__ import annotations

from pathlib import Path

import pytest

from service.command_line import server_command_line, service_command_line


@pytest.mark.parametrize("read", [server_command_line, service_command_line])
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["-m", "{folder}"], "error: -m {folder}: is a folder, where a .gguf file is wanted"),
        (["-m", "{folder}/none.gguf"], "error: -m {folder}/none.gguf: no such file"),
        (["-m", "{folder}/a.gguf", "--lora", "{folder}/b.gguf"], "--lora {folder}/b.gguf: no such"),
        (["-m", "{folder}/a.gguf", "-hf", "someone/something"], "-m and -hf both name a model"),
    ],
)
def test_a_start_that_cannot_be_ends_before_anything_listens(
    read: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    cause: str,
) -> None:
    (tmp_path / "a.gguf").touch()
    argv = [word.format(folder=tmp_path) for word in words]
    with pytest.raises(SystemExit) as ended:
        read(argv, {})  # pyright: ignore[reportCallIssue] # either of the two
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert cause.format(folder=tmp_path) in line


def test_an_adapter_may_be_a_folder(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.touch()
    options = service_command_line(["-m", str(model), "--lora", str(tmp_path)], {})
    assert [adapter.path for adapter in options.engine.adapters] == [str(tmp_path)]

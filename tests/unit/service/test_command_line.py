from __future__ import annotations

from pathlib import Path

import pytest

from service.command_line import server_command_line, service_command_line


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_help_is_on_stdout_and_ends_well(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        server_command_line(["-m", "x", "--help"], environ)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kvarts-server [flags]\n")


def test_version_names_program_and_number(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        service_command_line(["--version"], environ)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvarts-service 0.")


@pytest.mark.parametrize(
    "words", [["--nope"], ["--port", "x"], ["--rpc", "a"], ["--ssl-key-file", "k"]]
)
def test_a_bad_command_line_is_one_line_on_stderr_and_status_1(
    words: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        server_command_line(words, environ)
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvarts-server: error: ")
    assert words[0] in captured.err
    assert captured.err.count("\n") == 1


def test_the_service_alone_opens_its_port(environ: dict[str, str]) -> None:
    assert service_command_line([], environ).grpc_port == 50051
    assert service_command_line(["--grpc-port", "0"], environ).grpc_port == 0
    assert server_command_line([], environ).service.grpc_port is None


def test_metrics_have_a_port_only_where_one_is_asked_for(environ: dict[str, str]) -> None:
    assert service_command_line([], environ).metrics_port is None
    assert service_command_line(["--metrics-port", "0"], environ).metrics_port == 0


def test_the_service_alone_refuses_flags_of_the_gateway(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        service_command_line(["--no-slots"], environ)
    assert "is a flag of kvarts-server" in capsys.readouterr().err


def test_the_users_config_file_counts(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "config.ini").write_text("ctx-size = 77\n")
    assert server_command_line([], environ).service.engine.context_tokens == 77

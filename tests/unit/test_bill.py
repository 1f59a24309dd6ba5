from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import bill


def write_bill(path: Path, versions: dict[str, str]) -> Path:
    components = [{"name": name, "version": one} for name, one in versions.items()]
    path.write_text(json.dumps({"components": components}))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["bill", *map(str, arguments)])
    return bill.main()


def test_an_environment_is_what_its_bill_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = bill.read_installed(sys.executable)
    assert installed["numpy"] == version("numpy")
    whole = write_bill(tmp_path / "whole.json", installed)
    assert run(monkeypatch, whole, sys.executable) == 0

    other = installed | {"numpy": "0.1", "not-there": "2"}
    del other["jax"]
    wrong = write_bill(tmp_path / "wrong.json", other)
    capsys.readouterr()
    assert run(monkeypatch, wrong, sys.executable) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"jax: the bill has none, the environment {version('jax')}",
        "not-there: the bill has 2, the environment none",
        f"numpy: the bill has 0.1, the environment {version('numpy')}",
    ]


def test_an_environment_is_what_its_lock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = bill.read_installed(sys.executable)
    whole = write_bill(tmp_path / "whole.json", installed)
    pinned = {name: one for name, one in installed.items() if name not in ("pip", "setuptools")}
    pins = [f"{name}=={one} \\\n    --hash=sha256:00\n" for name, one in pinned.items()]
    lock = tmp_path / "lock"
    lock.write_text("".join(pin for pin in pins if not pin.startswith("kvarts")))
    assert run(monkeypatch, whole, sys.executable, "--lock", lock) == 0
    lock.write_text(lock.read_text().replace(f"jax=={version('jax')}", "jax==0.1"))
    capsys.readouterr()
    assert run(monkeypatch, whole, sys.executable, "--lock", lock) == 1
    assert capsys.readouterr().out == (f"jax: the lock has 0.1, the environment {version('jax')}\n")


def test_names_are_compared_as_indexes_do() -> None:
    assert bill.read_lock(
        "Jinja2==3.1 \\\n    # via x\nopentelemetry_api==1.0 ; python_version\n"
    ) == {
        "jinja2": "3.1",
        "opentelemetry-api": "1.0",
    }


def test_a_bill_lists_its_subject(tmp_path: Path) -> None:
    path = tmp_path / "bill.json"
    subject = {"component": {"name": "Kvarts", "version": "1"}}
    path.write_text(json.dumps({"metadata": subject, "components": []}))
    assert bill.read_bill(path) == {"kvarts": "1"}

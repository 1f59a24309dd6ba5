"""The lock of deployments: every dependency, by version and hash, and nothing of this machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text()


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", LOCK, re.M))


def test_every_dependency_is_locked_at_a_version_that_the_project_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["otel"]
    for text in wanted:
        requirement = Requirement(text)
        name = requirement.name.lower()
        assert name in locked(), name
        assert requirement.specifier.contains(locked()[name]), (name, locked()[name])


def test_every_entry_has_hashes_and_none_comes_from_elsewhere() -> None:
    for entry in re.split(r"\n(?=[a-z0-9])", LOCK.strip()):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:60]
    for foreign in ("://", "--index-url", "--find-links", " @ ", "file://"):
        assert foreign not in LOCK

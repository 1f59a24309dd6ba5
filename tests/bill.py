"""Compares a CycloneDX bill with what an environment holds, and with what it was to hold.

    python -m tests.bill dist/kvarts.cdx.json .venv/locked/bin/python --lock deploy/requirements.lock

`make sbom` runs it. The environment tells what it holds by the interpreter's own metadata, which is
not what wrote the bill.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What an environment has without being asked; the project itself is no dependency.
_OWN = frozenset({"kvarts", "pip", "setuptools"})
_LIST = (
    "import importlib.metadata as m, json;"
    "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
)

Versions = dict[str, str]
"""Versions by normal name."""


def main() -> int:
    """Prints each difference; returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.bill")
    parser.add_argument("bill", type=Path, help="CycloneDX, JSON")
    parser.add_argument("python", help="the interpreter of the environment")
    parser.add_argument("--lock", type=Path, help="the requirements that were installed")
    given = parser.parse_args()
    installed = read_installed(given.python)
    wrong = list(differences(read_bill(given.bill), installed, "the bill", "the environment"))
    if given.lock is not None:
        locked = read_lock(given.lock.read_text())
        asked = {name: one for name, one in installed.items() if name not in _OWN - locked.keys()}
        wrong += differences(locked, asked, "the lock", "the environment")
    print(*wrong or [f"{len(installed)} packages, as the bill says"], sep="\n")
    return 1 if wrong else 0


def differences(one: Versions, other: Versions, name: str, other_name: str) -> Iterator[str]:
    """Says where two sets differ, a line for each package."""
    for package in sorted(one.keys() | other.keys()):
        if one.get(package) != other.get(package):
            versions = one.get(package, "none"), other.get(package, "none")
            yield f"{package}: {name} has {versions[0]}, {other_name} {versions[1]}"


def read_bill(path: Path) -> Versions:
    """What a bill lists; its subject, where it has one, is a package too."""
    bill: dict[str, Any] = json.loads(path.read_text())
    subject = bill.get("metadata", {}).get("component")
    components = [*bill.get("components", []), *([subject] if subject else [])]
    return {normal(one["name"]): one["version"] for one in components}


def read_installed(python: str) -> Versions:
    """What an environment holds."""
    command = [python, "-I", "-c", _LIST]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {normal(name): version for name, version in json.loads(told)}


def read_lock(text: str) -> Versions:
    """What a file of requirements with hashes pins."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {normal(name): version for name, version in pins}


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())

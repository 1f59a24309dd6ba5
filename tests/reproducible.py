"""Builds the wheel twice, in two folders, and compares the bytes; `make reproducible` runs it.

With `--keep FOLDER` the wheel is left there where both are the same, as `.ci/wheel` has it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Returns 0 if both builds are the same file."""
    parser = argparse.ArgumentParser(prog="python -m tests.reproducible", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to leave the wheel")
    keep: Path | None = parser.parse_args().keep
    head = _git("log", "-1", "--format=%ct").decode().strip()
    tree = _git("archive", "HEAD")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        wheels = [_build(Path(folder), tree, head) for folder in (first, second)]
        digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
        for wheel, digest in zip(wheels, digests, strict=True):
            print(f"{digest}  {wheel.name}")
        if wheels[0].name != wheels[1].name or digests[0] != digests[1]:
            return 1
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheels[0], keep)
    return 0


def _build(folder: Path, tree: bytes, epoch: str) -> Path:
    with tarfile.open(fileobj=BytesIO(tree)) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "out", "."],
        cwd=folder,
        env=os.environ | {"SOURCE_DATE_EPOCH": epoch},
        check=True,
    )
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())

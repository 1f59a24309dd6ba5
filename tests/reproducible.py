"""Builds the wheel twice, in two folders, and compares the bytes; `make reproducible` runs it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Returns 0 if both builds are the same file."""
    head = _git("log", "-1", "--format=%ct").decode().strip()
    tree = _git("archive", "HEAD")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        digests = [_build(Path(folder), tree, head) for folder in (first, second)]
    for name, digest in digests:
        print(f"{digest}  {name}")
    return 0 if digests[0] == digests[1] else 1


def _build(folder: Path, tree: bytes, epoch: str) -> tuple[str, str]:
    with tarfile.open(fileobj=BytesIO(tree)) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "out", "."],
        cwd=folder,
        env=os.environ | {"SOURCE_DATE_EPOCH": epoch},
        check=True,
    )
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest()


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())

"""What memory held before never comes out: not in answers, errors or slots' files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.survivors.canary import NUM_SURVIVORS

_ROOT = Path(__file__).parents[4]
_FILLS = (0xA5, 0x5A)
# So long a run of one byte is no chance.
_RUN = 12


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is filled by glibc")
@pytest.mark.timeout(300)
def test_memory_that_was_never_written_is_never_told(tmp_path: Path) -> None:
    # Without these the interpreter and the C library keep small pieces by themselves, unfilled.
    options = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    environment = {name: one for name, one in os.environ.items() if name != "LD_PRELOAD"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.survivors.canary", str(tmp_path), *map(str, _FILLS)],
        cwd=_ROOT,
        env=environment | options | {"JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    one, other = json.loads(told)
    assert one["is_filled"], "fresh memory does not show what it was filled with"
    assert other["is_filled"]
    assert len(one["refusals"]) > 50, "few of the files were cut"
    assert len(one["survivors"]) == NUM_SURVIVORS
    for found, fill in ((one, _FILLS[0]), (other, _FILLS[1])):
        for text in _texts(found):
            assert chr(fill) * _RUN not in text
            assert f"\\x{fill:02x}" * 3 not in text, "as errors show a byte"
        for survivor in found["survivors"]:
            assert bytes([fill]) * _RUN not in bytes.fromhex(survivor["slot"])
    # Nor does anything depend on it: every probability and every byte saved is the same.
    assert one["refusals"] == other["refusals"]
    assert one["survivors"] == other["survivors"]


def _texts(found: dict[str, Any]) -> list[str]:
    answers = [survivor["answer"] for survivor in found["survivors"]]
    return [*found["refusals"], *answers]

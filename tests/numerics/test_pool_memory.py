"""Real memory, not bookkeeping: what a process takes follows its pools, and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.families import FAMILIES, TinyExperts, write_family
from tests.native import requires_native
from tests.pool_memory import PROMPT

# 144 MB of experts: 8 in each of 4 layers.
MODEL = replace(FAMILIES["gpt-oss"], experts=TinyExperts(used=4, hidden=6144, has_biases=True))
# What the allocator and the compiler may keep, beside a tenth of what the pools take.
SLACK_BYTES = 24 << 20

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@requires_native  # XLA works in memory of its own, the more of it the larger the pools
def test_anonymous_memory_follows_the_pools(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", MODEL, has_tokenizer=True)
    command = [sys.executable, "-m", "tests.pool_memory", str(path), str(tmp_path / "c")]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    rows: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    first = rows[0]
    for row in rows[1:]:
        books = row["books"] - first["books"]
        found = row["anonymous"] - first["anonymous"]
        most = max(abs(other["books"] - first["books"]) for other in rows)
        assert abs(found - books) <= most / 10 + SLACK_BYTES, (row, first)
        # Both slots kept what they held, whatever was changed.
        assert row["cached"] == [len(PROMPT) - 1] * 2, row["label"]
    # The second time round nothing comes on top.
    middle = rows[len(rows) // 2]
    assert middle["label"] == rows[-1]["label"]
    assert rows[-1]["anonymous"] <= middle["anonymous"] + SLACK_BYTES
    # The most that was taken at any moment: the largest pools, and what the process is without any.
    least = min(row["books"] for row in rows)
    most = max(row["books"] for row in rows)
    assert rows[-1]["highest"] <= most + (first["highest"] - least) + (256 << 20)

"""What is to be said of one golden; a process of its own may say it, so all goes in by value."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import NamedTuple

from tests.accept.folder import Golden, find_goldens
from tests.accept.outcome import Failure, Unsupported


class Judged(NamedTuple):
    """A golden by name, the verdict, what is worth saying beside it, and the time it took."""

    name: str
    verdict: str
    detail: str
    took_s: float


def judge(folder: Path, max_chunks: int, number: int) -> Judged:
    """Checks the golden of that number among those that `find_goldens` lists."""
    golden = list(find_goldens(folder, max_chunks))[number]
    started_s = time.monotonic()
    verdict, detail = _verdict(golden)
    return Judged(golden.name, verdict, detail, time.monotonic() - started_s)


def _verdict(golden: Golden) -> tuple[str, str]:
    try:
        return "passed", golden.check()
    except Unsupported as reason:
        return "unsupported", str(reason)
    except Failure as failure:
        return "failed", str(failure)
    # A crash in one file is that file's failure; the others are still worth knowing.
    except Exception:
        return "failed", traceback.format_exc()

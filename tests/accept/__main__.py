"""`python -m tests.accept DIR`: one line per golden file, then the sum; status 1 on a failure."""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
from pathlib import Path

from tests.accept.folder import Golden, find_goldens
from tests.accept.outcome import Failure, Unsupported

# A few of the nine or eight: each is evaluated by two models of real size.
_CHUNKS = 2


def main() -> int:
    """Checks the folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="accept", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with models/, goldens/ and vocabs/")
    parser.add_argument("--only", default="", help="check only files whose path contains this")
    parser.add_argument(
        "--chunks",
        type=int,
        default=_CHUNKS,
        help="chunks of 512 tokens that a divergence is measured on (default %(default)s)",
    )
    arguments = parser.parse_args()
    if not (arguments.folder / "goldens").is_dir():
        print(f"accept: {arguments.folder} has no goldens/", file=sys.stderr)
        return 1
    counts: collections.Counter[str] = collections.Counter()
    for golden in find_goldens(arguments.folder, arguments.chunks):
        if arguments.only not in golden.name:
            continue
        started_s = time.monotonic()
        verdict, detail = _judge(golden)
        counts[verdict] += 1
        took_s = time.monotonic() - started_s
        print(f"{verdict:11} {golden.name} ({took_s:.1f} s): {detail}", flush=True)
    print(
        f"accept: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['unsupported']} unsupported"
    )
    return 1 if counts["failed"] or not counts["passed"] else 0


def _judge(golden: Golden) -> tuple[str, str]:
    try:
        return "passed", golden.check()
    except Unsupported as reason:
        return "unsupported", str(reason)
    except Failure as failure:
        return "failed", str(failure)
    # A crash in one file is that file's failure; the others are still worth knowing.
    except Exception:
        return "failed", traceback.format_exc()


if __name__ == "__main__":
    sys.exit(main())

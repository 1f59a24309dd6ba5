"""`python -m tests.accept DIR`: one line per golden file, then the sum; status 1 on a failure."""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.accept.folder import find_goldens
from tests.accept.verdict import Judged, judge

# A few of the nine or eight: each is evaluated by two models of real size.
_CHUNKS = 2
# Each process holds a model of real size and its programs.
_MAX_JOBS = 4

_Map = Callable[[Callable[[int], Judged], Iterable[int]], Iterable[Judged]]


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
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(_MAX_JOBS, os.cpu_count() or 1),
        help="files checked at once, each in a process (default %(default)s)",
    )
    arguments = parser.parse_args()
    if not (arguments.folder / "goldens").is_dir():
        print(f"accept: {arguments.folder} has no goldens/", file=sys.stderr)
        return 1
    goldens = list(find_goldens(arguments.folder, arguments.chunks))
    chosen = [number for number, golden in enumerate(goldens) if arguments.only in golden.name]
    counts: collections.Counter[str] = collections.Counter()
    judge_one = partial(judge, arguments.folder, arguments.chunks)
    with _mapping(arguments.jobs) as map_ordered:
        for name, verdict, detail, took_s in map_ordered(judge_one, chosen):
            counts[verdict] += 1
            print(f"{verdict:11} {name} ({took_s:.1f} s): {detail}", flush=True)
    print(
        f"accept: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['unsupported']} unsupported"
    )
    return 1 if counts["failed"] or not counts["passed"] else 0


@contextmanager
def _mapping(jobs: int) -> Generator[_Map]:
    """A `map` over processes; started afresh, because XLA's threads do not survive a fork."""
    if jobs <= 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield pool.map


if __name__ == "__main__":
    sys.exit(main())

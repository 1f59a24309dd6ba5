"""Counts damaged models that load and say something; `make survivors` runs it under sanitizers.

    python -m tests.survivors 2000
    python -m tests.survivors --only llama-Q4_K 381

The first goes on until so many have emitted a token. Of a mutant that ends the process the last line
says the name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.kernels import native


def main() -> None:
    """Runs as many as asked for, and reports."""
    parser = argparse.ArgumentParser(prog="python -m tests.survivors")
    parser.add_argument("count", type=int, nargs="?", default=2000, help="tokens to see")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--only", nargs=2, metavar=("SEED", "NUMBER"), help="one mutant by name")
    parser.add_argument("--native-library", type=Path, help="native kernels to use")
    given = parser.parse_args()
    if given.native_library is not None:
        native.LIBRARY = given.native_library.resolve(strict=True)
    # Whether there are kernels is asked while this is imported: the library must be chosen by then.
    from tests.survivors.search import repeat, search

    if given.only is not None:
        repeat(given.only[0], int(given.only[1]))
    else:
        search(given.count, given.first)


if __name__ == "__main__":
    sys.exit(main())

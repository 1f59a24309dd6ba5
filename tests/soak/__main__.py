"""`python -m tests.soak`: check 32 on a model of one's own, as long as one likes.

Ends with 1 and a sentence for each figure that is not flat and each answer that is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import tempfile
from pathlib import Path

from tests.e2e.programs import running
from tests.soak.soak import soak

_NUM_SLOTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--lora", type=Path, required=True, help="an adapter of it")
    parser.add_argument("--minutes", type=float, default=45.0, help="default: 45, of check 32")
    parser.add_argument("--sample-seconds", type=float, default=10.0)
    parser.add_argument("--cache-ram", type=int, default=8, help="MiB, as the server takes it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            *("-m", str(options.model), "--lora", str(options.lora), "--port", "0"),
            *("--grpc-port", "0", "-np", str(_NUM_SLOTS), "-c", str(_NUM_SLOTS * 512)),
            # So little that it is full before the second quarter: a cache that fills is no leak.
            *("--cache-ram", str(options.cache_ram)),
            *("--embeddings", "--pooling", "mean", "--metrics", "--slot-save-path", folder),
        )
        with running("kvarts-server", *flags) as program:
            seen = asyncio.run(
                soak(
                    program,
                    _NUM_SLOTS,
                    60 * options.minutes,
                    options.sample_seconds,
                    functools.partial(print, flush=True),
                )
            )
    print(seen.report())
    faults = seen.faults()
    print("\n".join(faults) if faults else "flat")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

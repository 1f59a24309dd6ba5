"""Counts damaged models that load and say something; `make survivors` runs it under sanitizers.

    python -m tests.survivors 2000
    python -m tests.survivors --only llama-Q4_K 381

The first goes on until so many have emitted a token. Of a mutant that ends the process the last line
says the name.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from engine.compile_cache import enable_compile_cache
from engine.kernels import native
from engine.memory.heap import forget_programs
from tests.survivors.seeds import write_seeds
from tests.survivors.trial import Outcome, Trials

# A load that hangs is told with where it hangs.
_MOST_S = 300
_TOLD_EVERY = 50


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
    # Each answer that is not finite is logged as a fault, with where it came from.
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        enable_compile_cache(folder)  # a key of the head often changes nothing that is computed
        seeds = write_seeds(Path(folder))
        if given.only is not None:
            name, number = given.only
            print(Trials([seeds[name]], Path(folder)).try_one(seeds[name], int(number)))
            return
        _run(Trials(list(seeds.values()), Path(folder)), given.first, given.count)


def _run(trials: Trials, first: int, count: int) -> None:
    outcomes: list[Outcome] = []
    start = time.monotonic()
    gc.freeze()  # what is there stays: each load collects garbage several times
    number, num_tokens = first, 0
    while num_tokens < count:
        seed = trials.seeds[number % len(trials.seeds)]
        print(f"mutant: --only {seed.name} {number}", end="\r", flush=True)
        faulthandler.dump_traceback_later(_MOST_S, exit=True)
        outcomes.append(trials.try_one(seed, number))
        number, num_tokens = number + 1, num_tokens + outcomes[-1].has_token
        if len(outcomes) % _TOLD_EVERY == 0:
            faulthandler.dump_traceback_later(_MOST_S, exit=True)
            forget_programs()
            spent = time.monotonic() - start
            told = f"{len(outcomes)} mutants, {num_tokens} with tokens"
            print(f"{spent:6.0f} s  {told}, {trials.programs.num_made} compiled", flush=True)
    faulthandler.cancel_dump_traceback_later()
    _report(outcomes)


def _report(outcomes: list[Outcome]) -> None:
    loaded = [outcome for outcome in outcomes if not outcome.refusal]
    refusals = Counter(outcome.refusal for outcome in outcomes if outcome.refusal)
    for refusal, count in refusals.most_common():
        print(f"{count:7} {refusal}")
    answers = Counter(
        answer if isinstance(answer, str) else "tokens"
        for outcome in loaded
        for answer in outcome.answers
    )
    for answer, count in answers.most_common():
        print(f"{count:7} requests: {answer}")
    num_tokens = sum(outcome.has_token for outcome in loaded)
    print(f"{len(outcomes)} mutants, {len(loaded)} loaded, {num_tokens} emitted a token")


if __name__ == "__main__":
    sys.exit(main())

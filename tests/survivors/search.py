"""The search for survivors that say something, and what it tells."""

from __future__ import annotations

import faulthandler
import gc
import logging
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


def search(count: int, first: int) -> None:
    """Goes on from mutant `first` until `count` have emitted a token; says what became of all."""
    print(f"native kernels: {native.isa()} of {native.LIBRARY}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _prepare(folder)
        _run(Trials(list(write_seeds(Path(folder)).values()), Path(folder)), first, count)


def repeat(name: str, number: int) -> None:
    """Says what becomes of one mutant."""
    with tempfile.TemporaryDirectory() as folder:
        _prepare(folder)
        seed = write_seeds(Path(folder))[name]
        print(Trials([seed], Path(folder)).try_one(seed, number))


def _prepare(folder: str) -> None:
    # Each answer that is not finite is logged as a fault, with where it came from.
    logging.disable(logging.ERROR)
    enable_compile_cache(folder)  # a key of the head often changes nothing that is computed


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

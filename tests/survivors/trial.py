"""A damaged model in the real engine: refused by a typed error, or asked for tokens.

What it says is random; that it says something, or why not, is what is looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import EngineError, ModelFileError
from engine.loading import Loaded, load_engine
from engine.requests import Request, SamplingParams
from engine.scheduling.faults import NonFiniteLogits
from engine.step import PoolLost
from engine.types import Chunk, EngineConfig, Event, Failed, Finished
from tests.native import instruction_sets, instructions
from tests.survivors.damage import make_mutant
from tests.survivors.programs import KeptPrograms
from tests.survivors.seeds import Seed

# One full chunk, one that is not, and steps of one row.
_CONFIG = EngineConfig(
    256, num_slots=1, chunk_tokens=16, kernels="native", device="cpu", host_cache_bytes=0
)
_PROMPT = tuple((7 * index + index * index) % 240 + 3 for index in range(21))
_GREEDY, _DRAWN = SamplingParams(temperature=0.0), SamplingParams(seed=1)
_NUM_TOKENS = 3
_MOST_STEPS = 100


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: refused with a reason, or loaded and two requests answered.

    `answers` holds each one's number of tokens, or why it failed.
    """

    name: str
    number: int
    refusal: str = ""
    answers: tuple[int | str, ...] = ()

    @property
    def has_token(self) -> bool:
        """Whether it loaded and said something."""
        return any(isinstance(answer, int) for answer in self.answers)


@dataclass
class Trials:
    """Loads mutants one after another, in one process and one file.

    Each uses another of the processor's sets of instructions.
    """

    seeds: Sequence[Seed]
    folder: Path
    programs: KeptPrograms = field(default_factory=KeptPrograms)

    def try_one(self, seed: Seed, number: int) -> Outcome:
        """Whatever is not a typed error goes through, with the mutant's name."""
        sets = instruction_sets()
        path = self.folder / "mutant.gguf"
        path.write_bytes(make_mutant(seed, number))
        try:
            with instructions(sets[number % len(sets)]), self.programs.used():
                return _try(seed, number, path)
        except BaseException as error:
            error.add_note(f"mutant {number} of {seed.name}")
            raise


def _try(seed: Seed, number: int, path: Path) -> Outcome:
    events: list[tuple[str, Event]] = []
    config = replace(_CONFIG, moe_cache_slots=seed.expert_slots)
    try:
        loaded = load_engine(path, config, events.extend)
    except EngineError as error:
        return Outcome(seed.name, number, refusal=kind_of(error))
    try:
        answers = tuple(_ask(loaded, events, sampling) for sampling in (_GREEDY, _DRAWN))
        loaded.engine.check_integrity()
    finally:
        loaded.engine.stop()
        loaded.runner.close()
    return Outcome(seed.name, number, answers=answers)


def _ask(loaded: Loaded, events: list[tuple[str, Event]], sampling: SamplingParams) -> int | str:
    events.clear()
    request = Request(
        "r",
        tuple(token % loaded.spec.vocab_size for token in _PROMPT),
        sampling,
        max_tokens=_NUM_TOKENS,
        ignore_eos=True,
        cache_prompt=sampling is _DRAWN,
        top_logprobs=3,
    )
    try:
        loaded.engine.submit(request)
    except EngineError as error:
        return type(error).__name__
    for _ in range(_MOST_STEPS):
        loaded.engine.step()
        last = events[-1][1] if events else None
        if isinstance(last, Failed):
            return _fault(last.error, loaded)
        if isinstance(last, Finished):
            return _check([event for _, event in events if isinstance(event, Chunk)], loaded)
    raise AssertionError(f"no end after {_MOST_STEPS} steps: {events}")


def _fault(error: Exception, loaded: Loaded) -> str:
    """Of all that a fault may be, only these may come of what is in a file."""
    cause = error.__cause__
    if isinstance(cause, NonFiniteLogits):
        return "what the model made is not finite"
    experts = loaded.weights.experts
    if isinstance(cause, PoolLost) and experts is not None:
        failure = experts.pool.store.failure
        assert isinstance(failure, ModelFileError), failure
        return "an expert cannot be read"
    raise error


def _check(chunks: Sequence[Chunk], loaded: Loaded) -> int:
    assert chunks, "an answer without a token"
    for chunk in chunks:
        assert 0 <= chunk.token_id < loaded.spec.vocab_size
        assert chunk.logprobs is not None
        for one in (chunk.logprobs.sampled, *chunk.logprobs.top):
            assert one.logprob <= 1e-3, f"a probability above 1, or none: {one}"
            assert not math.isnan(one.logprob)
    return len(chunks)


def kind_of(error: EngineError) -> str:
    """An error without its names and numbers."""
    told = re.sub(r"'[^']*'|\"[^\"]*\"|-?\d+(\.\d+)?(e[+-]?\d+)?", "#", str(error))
    return f"{type(error).__name__}: {told.partition(': ')[2][:90]}"

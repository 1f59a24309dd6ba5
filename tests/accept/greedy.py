"""Greedy goldens: the same tokens, and log-probabilities within the recording's tolerance.

After a step whose two best tokens lie closer than the tolerance either is right, and what follows
need not agree, so comparison of that case ends there.
"""

from __future__ import annotations

import math
import queue
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from engine.adapters.errors import AdapterMismatch
from engine.errors import UnsupportedModel
from engine.loading import Loaded, load_engine
from engine.requests import AdapterScale, Request, SamplingParams
from engine.types import Chunk, Event, Failed, Finished, FinishReason, StartAdapter
from tests.accept.models import Model, Models
from tests.accept.outcome import Failure, Unsupported

_TIMEOUT_S = 300.0
# Ranks below the recorded ones are asked for as well: near ties may stand in another order.
_SPARE_RANKS = 16
_EXACT = 1e-3
# Real weights are larger sums; measured against llama.cpp's own exact run.
_EXACT_REAL = 2e-3
# llama.cpp computes the GELU of these models from a half-precision table.
_HALF_GELU = 1.5e-2
_HALF_GELU_REAL = 2e-2
# `first_logprobs` were rounded to four decimals.
_ROUNDING = 5e-5


@dataclass(frozen=True)
class Answer:
    """What the engine gave for one prompt; `logprobs` has one mapping by token id per step."""

    ids: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    reason: FinishReason


@dataclass
class Inbox:
    """Receives the engine's events; one request runs at a time."""

    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue[Event])

    def __call__(self, events: Sequence[tuple[str, Event]]) -> None:
        """Takes what one step gave."""
        for _, event in events:
            self.events.put(event)


def check_greedy(golden: Mapping[str, Any], models: Models) -> str:
    """Runs every case of a file; returns how many those are.

    Raises:
        Unsupported: the model is not one that this build runs.
        Failure: an answer differs.
    """
    model = models.find(golden["model"])
    with serving(golden, models) as (loaded, inbox):
        if "bad_shape" in golden:
            _check_bad_shape(golden, loaded, models)
        for case in golden["cases"]:
            _check_case(golden, case, loaded, inbox, tolerance(loaded.facts.architecture, model))
    return f"{len(golden['cases'])} cases"


@contextmanager
def serving(golden: Mapping[str, Any], models: Models) -> Generator[tuple[Loaded, Inbox]]:
    """A started engine with the file's model and adapters.

    Raises:
        Unsupported: the model is not one that this build runs.
    """
    path, inbox = models.find(golden["model"]).path, Inbox()
    adapters = tuple(
        StartAdapter(str(models.find(name).path)) for name in golden.get("adapters", ())
    )
    try:
        loaded = load_engine(path, replace(models.config, adapters=adapters), inbox)
    except UnsupportedModel as error:
        raise Unsupported(error.detail) from error
    loaded.engine.start()
    try:
        yield loaded, inbox
    finally:
        loaded.engine.stop()


def tolerance(architecture: str, model: Model) -> float:
    """The largest difference of a log-probability that is not an error."""
    if architecture.startswith("gemma"):
        return _HALF_GELU_REAL if model.is_real else _HALF_GELU
    return _EXACT_REAL if model.is_real else _EXACT


def _check_case(
    golden: Mapping[str, Any],
    case: Mapping[str, Any],
    loaded: Loaded,
    inbox: Inbox,
    limit: float,
) -> None:
    name = case["name"]
    prompt = loaded.tokenizer.encode(case["prompt"], add_special=True, parse_special=True)
    if prompt != case["prompt_ids"]:
        raise Failure(f"case {name}: the prompt becomes {prompt}, expected {case['prompt_ids']}")
    ranks = len(case["top_ids"][0]) + _SPARE_RANKS
    scales = _scales(case, loaded)
    answer = ask(loaded, inbox, prompt, golden["n_predict"], ranks, scales)
    compare(case, answer, limit)
    if "first_logprobs" in case:
        ranks = len(case["first_logprobs"])
        first = ask(loaded, inbox, prompt, 1, ranks, scales).logprobs[0]
        expected = dict(enumerate(cast("list[float]", case["first_logprobs"])))
        _compare_logprobs(f"case {name}, all of step 0", expected, first, limit + _ROUNDING)


def compare(case: Mapping[str, Any], answer: Answer, limit: float) -> None:
    """Compares a case with an answer.

    Raises:
        Failure: they differ by more than `limit` at a step that is not a tie.
    """
    lists = _recorded(case)
    for step, expected in enumerate(case["ids"]):
        where = f"case {case['name']}, step {step}"
        if step >= len(answer.ids):
            raise Failure(f"{where}: the answer ended ({answer.reason.value})")
        if step in lists:
            _compare_logprobs(where, lists[step], answer.logprobs[step], limit)
        if answer.ids[step] != expected:
            if _gap(lists.get(step)) < limit:
                return
            raise Failure(f"{where}: token {answer.ids[step]}, expected {expected}")
    if (case["stop"] == "eos") != (answer.reason is FinishReason.EOS):
        raise Failure(f"case {case['name']}: ended by {answer.reason.value}, not {case['stop']}")


def _recorded(case: Mapping[str, Any]) -> dict[int, dict[int, float]]:
    """The recorded log-probabilities by step; a step inside a UTF-8 character has none."""
    num_lists = len(case["top_ids"])
    steps = cast("list[int | None]", case.get("step_index") or list(range(num_lists)))
    ids = cast("list[list[int]]", case["top_ids"])
    logprobs = cast("list[list[float]]", case["top_logprobs"])
    return {
        step: dict(zip(ids[number], logprobs[number], strict=True))
        for number, step in enumerate(steps)
        if step is not None
    }


def _gap(logprobs: Mapping[int, float] | None) -> float:
    """The lead of the best token. A step without a list has none recorded and is no tie."""
    if logprobs is None or len(logprobs) < 2:
        return math.inf
    best, second = sorted(logprobs.values(), reverse=True)[:2]
    return best - second


def _compare_logprobs(
    where: str, expected: Mapping[int, float], got: Mapping[int, float], limit: float
) -> None:
    for token_id, logprob in expected.items():
        if token_id not in got:
            raise Failure(f"{where}: token {token_id} ({logprob:.5f}) is not among the best")
        difference = abs(got[token_id] - logprob)
        # Written so that a NaN fails.
        if not difference <= limit:
            raise Failure(
                f"{where}: token {token_id} has log-probability {got[token_id]:.5f}, expected "
                f"{logprob:.5f} within {limit:g}"
            )


def _scales(case: Mapping[str, Any], loaded: Loaded) -> tuple[AdapterScale, ...] | None:
    """The request's own set; None for the server's, which is brought about as the case says."""
    if "scales" not in case:
        return None
    scales = cast("list[float]", case["scales"])
    named = tuple(AdapterScale(i, scale) for i, scale in enumerate(scales))
    if "how" not in case:
        return named
    if "POST" in case["how"]:
        loaded.engine.adapters.set_scales(named).result(_TIMEOUT_S)
    return None


def _check_bad_shape(golden: Mapping[str, Any], loaded: Loaded, models: Models) -> None:
    """The adapter that llama.cpp refused is refused here too, by the name of a tensor."""
    (tensor,) = re.findall(r"tensor '([^']+)' has incorrect shape", golden["bad_shape"][0])
    name = re.findall(r"[^/']+\.gguf", golden["bad_shape"][1])[0]
    try:
        loaded.engine.adapters.read(models.find(name).path)
    except AdapterMismatch as error:
        if not error.tensor.startswith("blk.0.attn_"):
            raise Failure(f"{name}: {error}, expected a refusal of {tensor}") from error
        return
    raise Failure(f"{name} was taken")


def ask(
    loaded: Loaded,
    inbox: Inbox,
    prompt: list[int],
    max_tokens: int,
    ranks: int,
    adapters: tuple[AdapterScale, ...] | None = None,
) -> Answer:
    """Runs one prompt, greedily and from nothing; `ranks` log-probabilities per step."""
    loaded.engine.submit(
        Request(
            request_id="accept",
            prompt=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            top_logprobs=ranks,
            # Each case is cold, so that none leans on what another left.
            cache_prompt=False,
            adapters=adapters,
        )
    )
    ids: list[int] = []
    logprobs: list[Mapping[int, float]] = []
    while True:
        match inbox.events.get(timeout=_TIMEOUT_S):
            case Chunk(token_id=token_id, logprobs=probabilities):
                assert probabilities is not None
                ids.append(token_id)
                logprobs.append({p.token_id: p.logprob for p in probabilities.top})
            case Finished(reason=reason):
                return Answer(ids, logprobs, reason)
            case Failed(error=error):
                raise Failure(f"the engine failed: {error}") from error
            case _:
                continue

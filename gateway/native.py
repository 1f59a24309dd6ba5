"""The native dialect: `/completion` and `/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from kvarts.v1 import generation_pb2

from gateway.dialect import Outcome, Step, progress_json
from gateway.peer_json import Json
from gateway.run import Sample
from gateway.sse import PLAIN
from gateway.timings import Timings

STOP_TYPES = {
    generation_pb2.FINISH_REASON_EOS: "eos",
    generation_pb2.FINISH_REASON_STOP: "word",
    generation_pb2.FINISH_REASON_EMPTY_PROMPT: "none",
}


class NativeDialect:
    """Bodies as llama-server's own clients read them."""

    needs_prompt_text = True
    framing = PLAIN

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def step(self, step: Step) -> Sequence[Json]:
        """One event per token."""
        return [partial(step)]

    def progress(
        self, sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
    ) -> Sequence[Json]:
        """One event per piece of the prompt."""
        return [progressed(sample, progress, timings)]

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """What was withheld until now, where something was, and the event that has `stop` true."""
        last = final(replace(outcome, text=""), self._model_name)
        return [withheld(outcome), last] if outcome.text else [last]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """One object, or a list for several prompts or samples."""
        answers = [final(outcome, self._model_name) for outcome in outcomes]
        return answers[0] if len(answers) == 1 else answers


def partial(step: Step) -> dict[str, Json]:
    """A token's event; `tokens` is filled whatever `return_tokens` says."""
    chunk = step.chunk
    event = _event(step.sample, chunk.text, [chunk.token_id], chunk.completion_tokens, step.timings)
    if step.probability is not None:
        event["completion_probabilities"] = [step.probability]
    return event


def withheld(outcome: Outcome) -> dict[str, Json]:
    """The event of text that came to be sent with no token of its own."""
    return _event(outcome.sample, outcome.text, [], outcome.finished.completion_tokens, None)


def progressed(
    sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
) -> dict[str, Json]:
    """A prompt's event; the peer shows the token 0 beside it."""
    event = _event(sample, "", [0], 0, timings)
    event["prompt_progress"] = progress_json(progress)
    return event


def final(outcome: Outcome, model_name: str) -> dict[str, Json]:
    """The complete result, cut to `response_fields` where the request named some."""
    finished, job = outcome.finished, outcome.sample.job
    result: dict[str, Json] = {
        "index": job.index,
        "content": outcome.text,
        "tokens": outcome.tokens,
        "id_slot": outcome.sample.started.slot_id,
        "stop": True,
        "model": model_name,
        "tokens_predicted": finished.completion_tokens,
        "tokens_evaluated": finished.prompt_tokens,
        "generation_settings": job.resolved.settings(),
        "prompt": outcome.prompt_text,
        "has_new_line": finished.has_new_line,
        "truncated": finished.truncated,
        "stop_type": STOP_TYPES.get(finished.finish_reason, "limit"),
        "stopping_word": finished.stop_string,
        "tokens_cached": finished.held_tokens,
        "timings": outcome.timings.to_json(),
    }
    if outcome.probabilities:
        result["completion_probabilities"] = outcome.probabilities
    paths = job.params.response_fields
    return _selected(result, paths) if paths else result


def _event(
    sample: Sample, text: str, tokens: list[int], num_predicted: int, timings: Timings | None
) -> dict[str, Json]:
    event: dict[str, Json] = {
        "index": sample.job.index,
        "content": text,
        "tokens": tokens,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": num_predicted,
        "tokens_evaluated": len(sample.job.prompt),
    }
    if timings is not None:
        event["timings"] = timings.to_json()
    return event


def _selected(result: Mapping[str, Json], paths: Sequence[str]) -> dict[str, Json]:
    """Keeps the values at the given paths, each under its whole path as a key."""
    selected: dict[str, Json] = {}
    for path in paths:
        value: Any = result
        for key in path.split("/"):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = cast("Mapping[str, Any]", value)[key]
        else:
            selected[path] = value
    return selected

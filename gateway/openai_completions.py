"""OpenAI's text completions: `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kvarts.v1 import generation_pb2

from gateway import native
from gateway.dialect import Outcome, Step, progress_json
from gateway.facts import Facts, random_id
from gateway.peer_json import Json
from gateway.run import Sample
from gateway.sse import DONE
from gateway.timings import Timings

_STOPPED = (generation_pb2.FINISH_REASON_EOS, generation_pb2.FINISH_REASON_STOP)


class CompletionsDialect:
    """Bodies of one request; all of them carry the same id."""

    framing = DONE

    def __init__(self, facts: Facts, *, is_verbose: bool) -> None:
        self._facts = facts
        self._id = completion_id()
        self.needs_prompt_text = is_verbose

    def step(self, step: Step) -> Sequence[Json]:
        """One event per token, also where it released nothing."""
        logprobs = None if step.probability is None else {"content": [step.probability]}
        event = self._event(step.sample, step.chunk.text, logprobs, None)
        if step.sample.job.params.verbose:
            event["__verbose"] = native.partial(step)
        if step.timings is not None:
            event["timings"] = step.timings.to_json()
        return [event]

    def progress(
        self, sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
    ) -> Sequence[Json]:
        """One event per piece of the prompt."""
        event = self._event(sample, "", None, None)
        if sample.job.params.verbose:
            event["__verbose"] = native.progressed(sample, progress, timings)
        if timings is not None:
            event["timings"] = timings.to_json()
        event["prompt_progress"] = progress_json(progress)
        return [event]

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """What was withheld until now, where something was, and the finish reason with the usage."""
        last = self._final(replace(outcome, text=""))
        if not outcome.text:
            return [last]
        rest = self._event(outcome.sample, outcome.text, None, None)
        if outcome.sample.job.params.verbose:
            rest["__verbose"] = native.withheld(outcome)
        return [rest, last]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """One object with a choice per sample; its other members are the first sample's."""
        return merged_choices([self._final(outcome) for outcome in outcomes])

    def _event(
        self, sample: Sample, text: str, logprobs: Json, finish_reason: str | None
    ) -> dict[str, Json]:
        return {
            "choices": [
                {
                    "text": text,
                    "index": sample.job.index,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason,
                }
            ],
            **header(self._facts),
            "object": "text_completion",
            "id": self._id,
        }

    def _final(self, outcome: Outcome) -> dict[str, Json]:
        logprobs = {"content": outcome.probabilities} if outcome.probabilities else None
        event = self._event(outcome.sample, outcome.text, logprobs, finish_reason(outcome))
        # The usage stands before the id.
        del event["id"]
        event |= {"usage": usage(outcome), "id": self._id}
        return event | closing(outcome, self._facts.name)


def completion_id() -> str:
    """A fresh id in the peer's form."""
    return f"chatcmpl-{random_id()}"


def header(facts: Facts) -> dict[str, Json]:
    """The members that say when, what and which build."""
    return {
        "created": int(time.time()),
        "model": facts.name,
        "system_fingerprint": facts.info.build_info,
    }


def finish_reason(outcome: Outcome) -> str:
    """OpenAI's reason: stopped by the model or a stop text, or cut by a limit."""
    return "stop" if outcome.finished.finish_reason in _STOPPED else "length"


def usage(outcome: Outcome) -> dict[str, Json]:
    """The tokens of one sample."""
    finished = outcome.finished
    return {
        "completion_tokens": finished.completion_tokens,
        "prompt_tokens": finished.prompt_tokens,
        "total_tokens": finished.completion_tokens + finished.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def closing(outcome: Outcome, model_name: str) -> dict[str, Json]:
    """What stands at the end of a complete answer."""
    members: dict[str, Json] = {}
    if outcome.sample.job.params.verbose:
        members["__verbose"] = native.final(outcome, model_name)
    if outcome.finished.finish_reason != generation_pb2.FINISH_REASON_EMPTY_PROMPT:
        members["timings"] = outcome.timings.to_json()
    return members


def merged_choices(answers: Sequence[dict[str, Json]]) -> Json:
    """The first answer with the choices of all; every answer has one."""
    choices: list[Json] = []
    for answer in answers:
        choice = answer["choices"]
        assert isinstance(choice, list)
        choices += choice
    return answers[0] | {"choices": choices}

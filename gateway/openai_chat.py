"""OpenAI's chat completions: the bodies of answers and the events of streams."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.v1 import generation_pb2

from gateway.dialect import Outcome, Step, progress_json
from gateway.facts import Facts
from gateway.openai_completions import (
    closing,
    completion_id,
    finish_reason,
    header,
    merged_choices,
    usage,
)
from gateway.peer_json import Json
from gateway.run import Sample
from gateway.sse import DONE
from gateway.timings import Timings

_ROLE: dict[str, Json] = {"role": "assistant", "content": None}


class ChatDialect:
    """Bodies of one chat request.

    `prefill` is what the continued last message already holds: part of every whole answer, and
    the first thing of a stream unless the client asked for the continuation itself.
    """

    framing = DONE

    def __init__(
        self, facts: Facts, *, prefill: str, is_prefill_streamed: bool, is_verbose: bool
    ) -> None:
        self._facts = facts
        self._id = completion_id()
        self._prefill = prefill
        self._owed = prefill if is_prefill_streamed else ""
        self._has_sent: set[int] = set()
        self.needs_prompt_text = is_verbose

    def step(self, step: Step) -> Sequence[Json]:
        """The role with the first token, then what a token released; nothing if it held back."""
        deltas: list[Json] = [_ROLE] if step.chunk.completion_tokens == 1 else []
        deltas += self._content(step.sample, step.chunk.text)
        events = [self._event(step.sample, delta, None) for delta in deltas]
        if not events:
            return []
        if step.probability is not None:
            logprobs: Json = {"content": [step.probability]}
            choice = self._choice(step.sample, deltas[-1], None) | {"logprobs": logprobs}
            events[-1]["choices"] = [choice]
        if step.timings is not None:
            events[-1]["timings"] = step.timings.to_json()
        return events

    def progress(
        self, sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
    ) -> Sequence[Json]:
        """The role again with every piece of the prompt, as the peer sends it."""
        deltas = [_ROLE, *self._content(sample, "")]
        events = [self._event(sample, delta, None) for delta in deltas]
        if timings is not None:
            events[-1]["timings"] = timings.to_json()
        events[-1]["prompt_progress"] = progress_json(progress)
        return events

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """The finish reason, and the usage in an event of its own where it was asked for."""
        sample, params = outcome.sample, outcome.sample.job.params
        events = [self._event(sample, delta, None) for delta in self._content(sample, "")]
        events.append(self._event(sample, {}, finish_reason(outcome)))
        if params.include_usage:
            total = self._event(sample, {}, None)
            total["choices"] = ()
            total["usage"] = usage(outcome)
            events.append(total)
        last = closing(outcome, self._facts.name)
        if "timings" in last:
            events[-1]["timings"] = last["timings"]
        if "__verbose" in last:
            events[0]["__verbose"] = last["__verbose"]
        return events

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """One object with a choice per sample; its other members are the first sample's."""
        return merged_choices([self._final(outcome) for outcome in outcomes])

    def _content(self, sample: Sample, text: str) -> list[Json]:
        if sample.job.index not in self._has_sent:
            self._has_sent.add(sample.job.index)
            text = self._owed + text
        return [{"content": text}] if text else []

    def _choice(self, sample: Sample, delta: Json, reason: str | None) -> dict[str, Json]:
        return {"finish_reason": reason, "index": sample.job.index, "delta": delta}

    def _event(self, sample: Sample, delta: Json, reason: str | None) -> dict[str, Json]:
        said = header(self._facts)
        return {
            "choices": [self._choice(sample, delta, reason)],
            "created": said["created"],
            "id": self._id,
            "model": said["model"],
            "system_fingerprint": said["system_fingerprint"],
            "object": "chat.completion.chunk",
        }

    def _final(self, outcome: Outcome) -> dict[str, Json]:
        choice: dict[str, Json] = {
            "finish_reason": finish_reason(outcome),
            "index": outcome.sample.job.index,
            "message": {"role": "assistant", "content": self._prefill + outcome.text},
        }
        if outcome.probabilities:
            choice["logprobs"] = {"content": outcome.probabilities}
        return {
            "choices": [choice],
            **header(self._facts),
            "object": "chat.completion",
            "usage": usage(outcome),
            "id": self._id,
        } | closing(outcome, self._facts.name)

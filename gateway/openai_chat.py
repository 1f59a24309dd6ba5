"""OpenAI's chat completions: the bodies of answers and the events of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from gateway.reply import Call, ChatDelta, Reply, behind
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
        self,
        facts: Facts,
        *,
        prefill: Sequence[ChatDelta],
        is_prefill_streamed: bool,
        is_verbose: bool,
    ) -> None:
        self._facts = facts
        self._id = completion_id()
        self._prefill = prefill
        self._owed = prefill if is_prefill_streamed else ()
        self._has_sent: set[int] = set()
        # Samples that have called a tool.
        self._callers: set[int] = set()
        self.needs_prompt_text = is_verbose

    def step(self, step: Step) -> Sequence[Json]:
        """The role with the first token, then what a token released; nothing if it held back."""
        deltas: list[Json] = [_ROLE] if step.chunk.completion_tokens == 1 else []
        deltas += self._grown(step.sample, step.deltas)
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
        deltas = [_ROLE, *self._grown(sample, ())]
        events = [self._event(sample, delta, None) for delta in deltas]
        if timings is not None:
            events[-1]["timings"] = timings.to_json()
        events[-1]["prompt_progress"] = progress_json(progress)
        return events

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """The finish reason, and the usage in an event of its own where it was asked for."""
        sample, params = outcome.sample, outcome.sample.job.params
        events = [self._event(sample, delta, None) for delta in self._grown(sample, outcome.deltas)]
        has_calls = sample.job.index in self._callers
        events.append(self._event(sample, {}, _reason(outcome, has_calls=has_calls)))
        if params.include_usage:
            total = self._event(sample, {}, None)
            total["choices"] = ()
            total["usage"] = usage(outcome)
            events.append(total)
        last = closing(replace(outcome, text=""), self._facts.name)
        if "timings" in last:
            events[-1]["timings"] = last["timings"]
        if "__verbose" in last:
            events[0]["__verbose"] = last["__verbose"]
        return events

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """One object with a choice per sample; its other members are the first sample's."""
        return merged_choices([self._final(outcome) for outcome in outcomes])

    def _grown(self, sample: Sample, deltas: Sequence[ChatDelta]) -> list[Json]:
        """The pieces as the peer writes them, behind what is owed of the last message."""
        index = sample.job.index
        if index not in self._has_sent:
            self._has_sent.add(index)
            deltas = behind(self._owed, deltas)
        if any(delta.HasField("tool_call") for delta in deltas):
            self._callers.add(index)
        return [_delta(delta) for delta in deltas]

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
        reply = Reply()
        for delta in behind(self._prefill, outcome.deltas):
            reply.add(delta)
        cut = len(reply.content) - outcome.finished.indent_cut_chars
        message: dict[str, Json] = {
            "role": "assistant",
            "content": reply.content[:cut],
        }
        if reply.has_reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call(call) for call in reply.calls]
        choice: dict[str, Json] = {
            "finish_reason": _reason(outcome, has_calls=bool(reply.calls)),
            "index": outcome.sample.job.index,
            "message": message,
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


def _reason(outcome: Outcome, *, has_calls: bool) -> str:
    reason = finish_reason(outcome)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _delta(delta: ChatDelta) -> dict[str, Json]:
    match delta.WhichOneof("delta"):
        case "reasoning":
            return {"reasoning_content": delta.reasoning}
        case "tool_call":
            return {"tool_calls": [_call_piece(delta.tool_call)]}
        case _:
            return {"content": delta.content}


def _call_piece(piece: generation_pb2.ToolCallDelta) -> dict[str, Json]:
    shown: dict[str, Json] = {"index": piece.index}
    function: dict[str, Json] = {}
    if piece.name:
        shown |= {"id": piece.id, "type": "function"}
        function["name"] = piece.name
    function["arguments"] = piece.arguments_json
    return shown | {"function": function}


def _call(call: Call) -> dict[str, Json]:
    function: dict[str, Json] = {"name": call.name, "arguments": call.arguments_json}
    return {"type": "function", "function": function, "id": call.call_id}

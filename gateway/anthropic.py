"""Anthropic's messages: the bodies of answers and the events of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarts.v1 import generation_pb2

from gateway import peer_json
from gateway.dialect import Outcome, Step
from gateway.facts import Facts
from gateway.openai_completions import completion_id
from gateway.peer_json import Json
from gateway.reply import ChatDelta, behind
from gateway.run import Sample
from gateway.sse import NAMED_ERRORS
from gateway.timings import Timings

_ENDED = (generation_pb2.FINISH_REASON_EOS, generation_pb2.FINISH_REASON_STOP)
_THINKING, _TEXT, _TOOL_USE = "thinking", "text", "tool_use"


@dataclass
class _Block:
    """One block of a message as it grows. `call_id` and `name` are those of a call."""

    kind: str
    pieces: list[str] = field(default_factory=list[str])
    call_id: str = ""
    name: str = ""

    def whole(self) -> Json:
        text = "".join(self.pieces)
        match self.kind:
            case "thinking":
                # There is no signature that a local model could give.
                return {"type": "thinking", "thinking": text, "signature": ""}
            case "text":
                return {"type": "text", "text": text}
            case _:
                given = {"type": "tool_use", "id": self.call_id, "name": self.name}
                return given | {"input": _arguments(text)}


class MessagesDialect:
    """Bodies of one request, which has one sample.

    `prefill` is what the continued last message holds, the first thing that the answer says.
    """

    framing = NAMED_ERRORS
    needs_prompt_text = False

    def __init__(self, facts: Facts, *, prefill: Sequence[ChatDelta]) -> None:
        self._facts = facts
        self._id = completion_id()
        self._owed = prefill
        self._has_started = False
        # In order of arrival: a client tells what it adds to apart by number alone.
        self._blocks: list[_Block] = []

    def step(self, step: Step) -> Sequence[Json]:
        """The start of the message with the first event, then what a token added to its blocks."""
        events = self._start(step.sample)
        for delta in self._with_owed(step.deltas):
            events += self.grown(delta)
        return events

    def progress(
        self, sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
    ) -> Sequence[Json]:
        """Nothing: the API has no such event."""
        del sample, progress, timings
        return []

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """The ends of all blocks, and of the message."""
        events = self._start(outcome.sample)
        for delta in self._with_owed(outcome.deltas):
            events += self.grown(delta)
        signature: Json = {"type": "signature_delta", "signature": ""}
        events += [
            _event("content_block_delta", index=index, delta=signature)
            for index, block in enumerate(self._blocks)
            if block.kind == _THINKING
        ]
        events += [_event("content_block_stop", index=i) for i in range(len(self._blocks))]
        finished = outcome.finished
        events.append(
            _event(
                "message_delta",
                delta={
                    "stop_reason": self._stop_reason(finished),
                    "stop_sequence": finished.stop_string or None,
                },
                usage={"output_tokens": finished.completion_tokens},
            )
        )
        events.append(_event("message_stop"))
        return events

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """One message; a request has one sample."""
        outcome = outcomes[0]
        for delta in self._with_owed(outcome.deltas):
            self.grown(delta)
        finished = outcome.finished
        blocks = [block.whole() for block in self._blocks]
        message = self._message(blocks, finished.cached_tokens, finished.prompt_tokens)
        message["usage"]["output_tokens"] = finished.completion_tokens
        return message | {
            "stop_reason": self._stop_reason(finished),
            "stop_sequence": finished.stop_string or None,
        }

    def _start(self, sample: Sample) -> list[Json]:
        if self._has_started:
            return []
        self._has_started = True
        started = sample.started
        message = self._message([], started.cached_tokens, started.prompt_tokens)
        return [_event("message_start", message=message)]

    def _message(self, blocks: list[Json], cached: int, prompt: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._facts.name,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": cached,
                "input_tokens": prompt - cached,
                "output_tokens": 0,
            },
        }

    def _with_owed(self, deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
        owed, self._owed = self._owed, ()
        return behind(owed, deltas)

    def grown(self, delta: ChatDelta) -> list[Json]:
        """The events of one piece: its block's start, where it is the first, and the piece."""
        match delta.WhichOneof("delta"):
            case "reasoning":
                added: Json = {"type": "thinking_delta", "thinking": delta.reasoning}
                return self._said(_THINKING, delta.reasoning, added)
            case "content":
                added = {"type": "text_delta", "text": delta.content}
                return self._said(_TEXT, delta.content, added)
            case "tool_call":
                return self._called(delta.tool_call)
            case None:
                return []

    def _said(self, kind: str, text: str, added: Json) -> list[Json]:
        events: list[Json] = []
        if not self._blocks or self._blocks[-1].kind != kind:
            events.append(self._begin(_Block(kind), {"type": kind, kind: ""}))
        return [*events, self._add(text, added)]

    def _called(self, call: generation_pb2.ToolCallDelta) -> list[Json]:
        events: list[Json] = []
        if call.name:
            block = _Block(_TOOL_USE, call_id=call.id, name=call.name)
            shown: Json = {"type": _TOOL_USE, "id": call.id, "name": call.name}
            events.append(self._begin(block, shown))
        if call.arguments_json:
            added: Json = {"type": "input_json_delta", "partial_json": call.arguments_json}
            events.append(self._add(call.arguments_json, added))
        return events

    def _begin(self, block: _Block, shown: Json) -> Json:
        self._blocks.append(block)
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=shown)

    def _add(self, text: str, added: Json) -> Json:
        self._blocks[-1].pieces.append(text)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=added)

    def _stop_reason(self, finished: generation_pb2.Finished) -> str:
        if finished.finish_reason not in _ENDED:
            return "max_tokens"
        has_called = any(block.kind == _TOOL_USE for block in self._blocks)
        return "tool_use" if has_called else "end_turn"


def _arguments(text: str) -> Json:
    try:
        return peer_json.read(text.encode())
    except peer_json.UnreadableJson:
        # A call that a limit cut off.
        return {}


def _event(name: str, **members: Json) -> Json:
    return {"event": name, "data": {"type": name, **members}}

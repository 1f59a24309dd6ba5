"""Anthropic's messages: the bodies of answers and the events of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarts.v1 import generation_pb2

from gateway import peer_json
from gateway.dialect import Outcome, Step
from gateway.facts import Facts
from gateway.openai_completions import completion_id
from gateway.peer_json import Json
from gateway.reply import Call, ChatDelta, Reply, behind
from gateway.run import Sample
from gateway.sse import NAMED_ERRORS
from gateway.timings import Timings

_ENDED = (generation_pb2.FINISH_REASON_EOS, generation_pb2.FINISH_REASON_STOP)


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
        self._reply = Reply()

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
        if self._reply.has_reasoning:
            signature: Json = {"type": "signature_delta", "signature": ""}
            events.append(_event("content_block_delta", index=0, delta=signature))
        blocks = self._num_text_blocks + len(self._reply.calls)
        events += [_event("content_block_stop", index=index) for index in range(blocks)]
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
            self._reply.add(delta)
        finished = outcome.finished
        message = self._message(self._blocks(), finished.cached_tokens, finished.prompt_tokens)
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

    @property
    def _num_text_blocks(self) -> int:
        return int(self._reply.has_reasoning) + int(self._reply.has_content)

    def grown(self, delta: ChatDelta) -> list[Json]:
        """The events of one piece: its block's start, where it is the first, and the piece."""
        had_reasoning, had_content = self._reply.has_reasoning, self._reply.has_content
        self._reply.add(delta)
        match delta.WhichOneof("delta"):
            case "reasoning":
                piece: Json = {"type": "thinking_delta", "thinking": delta.reasoning}
                block: Json = {"type": "thinking", "thinking": ""}
                return _piece(0, None if had_reasoning else block, piece)
            case "content":
                piece = {"type": "text_delta", "text": delta.content}
                block = {"type": "text", "text": ""}
                index = int(self._reply.has_reasoning)
                return _piece(index, None if had_content else block, piece)
            case "tool_call":
                return self._called(delta.tool_call)
            case None:
                return []

    def _called(self, call: generation_pb2.ToolCallDelta) -> list[Json]:
        block: Json = None
        if call.name:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
        piece: Json = None
        if call.arguments_json:
            piece = {"type": "input_json_delta", "partial_json": call.arguments_json}
        return _piece(self._num_text_blocks + call.index, block, piece)

    def _blocks(self) -> list[Json]:
        blocks: list[Json] = []
        if self._reply.has_reasoning:
            # There is no signature that a local model could give.
            thinking = self._reply.reasoning
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if self._reply.has_content:
            blocks.append({"type": "text", "text": self._reply.content})
        return [*blocks, *(_tool_use(call) for call in self._reply.calls)]

    def _stop_reason(self, finished: generation_pb2.Finished) -> str:
        if finished.finish_reason not in _ENDED:
            return "max_tokens"
        return "tool_use" if self._reply.calls else "end_turn"


def _tool_use(call: Call) -> Json:
    try:
        arguments: Json = peer_json.read(call.arguments_json.encode())
    except peer_json.UnreadableJson:
        # A call that a limit cut off.
        arguments = {}
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _piece(index: int, block: Json, delta: Json) -> list[Json]:
    events: list[Json] = []
    if block is not None:
        events.append(_event("content_block_start", index=index, content_block=block))
    if delta is not None:
        events.append(_event("content_block_delta", index=index, delta=delta))
    return events


def _event(name: str, **members: Json) -> Json:
    return {"event": name, "data": {"type": name, **members}}

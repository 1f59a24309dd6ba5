"""OpenAI's responses: the bodies of answers and the events of streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvarts.v1 import generation_pb2

from gateway.dialect import Outcome, Step, progress_json
from gateway.facts import Facts, random_id
from gateway.peer_json import Json
from gateway.reply import Call, ChatDelta, Reply, behind
from gateway.run import Sample
from gateway.sse import NAMED
from gateway.timings import Timings


class ResponsesDialect:
    """Bodies of one request, which has one sample.

    `prefill` is what the continued last message holds, the first thing that the answer says.
    """

    framing = NAMED
    needs_prompt_text = False

    def __init__(self, facts: Facts, *, prefill: Sequence[ChatDelta]) -> None:
        self._facts = facts
        self._id = f"resp_{random_id()}"
        self._message_id = f"msg_{random_id()}"
        self._reasoning_id = f"rs_{random_id()}"
        self._owed = prefill
        self._has_started = False
        self._reply = Reply()

    def step(self, step: Step) -> Sequence[Json]:
        """The start of the response with the first event, then what a token added to its items."""
        events = self._start()
        for delta in self._with_owed(step.deltas):
            events += self.grown(delta)
        if events and step.timings is not None:
            events[-1]["data"]["timings"] = step.timings.to_json()
        return events

    def progress(
        self, sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
    ) -> Sequence[Json]:
        """That the response is in progress, with every piece of the prompt."""
        del sample
        events = self._start() or [self._in_progress()]
        data = events[-1]["data"]
        if timings is not None:
            data["timings"] = timings.to_json()
        data["prompt_progress"] = progress_json(progress)
        return events

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """The ends of all items, and of the response."""
        events = self._start()
        for delta in self._with_owed(outcome.deltas):
            events += self.grown(delta)
        items: list[Json] = []
        for item in self._stream_items():
            if item["type"] == "message":
                (part,) = item["content"]
                own = {"item_id": self._message_id}
                events.append(_event("response.output_text.done", **own, text=part["text"]))
                events.append(_event("response.content_part.done", **own, part=part))
            events.append(_event("response.output_item.done", item=item))
            items.append(item)
        response: Json = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "model": self._facts.name,
            "output": items,
            "usage": _usage(outcome),
        }
        completed = _event("response.completed", response=response)
        completed["data"]["timings"] = outcome.timings.to_json()
        return [*events, completed]

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """One response; a request has one sample."""
        outcome = outcomes[0]
        for delta in self._with_owed(outcome.deltas):
            self._reply.add(delta)
        now = int(time.time())
        return {
            "completed_at": now,
            "created_at": now,
            "id": self._id,
            "model": self._facts.name,
            "object": "response",
            "output": self._items(),
            "status": "completed",
            "usage": _usage(outcome),
        }

    def _start(self) -> list[dict[str, Any]]:
        if self._has_started:
            return []
        self._has_started = True
        return [_event("response.created", response=self._state()), self._in_progress()]

    def _in_progress(self) -> dict[str, Any]:
        return _event("response.in_progress", response=self._state())

    def _state(self) -> Json:
        return {"id": self._id, "object": "response", "status": "in_progress"}

    def _with_owed(self, deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
        owed, self._owed = self._owed, ()
        return behind(owed, deltas)

    def grown(self, delta: ChatDelta) -> list[dict[str, Any]]:
        """The events of one piece: its item's start, where it is the first, and the piece."""
        had_reasoning, had_content = self._reply.has_reasoning, self._reply.has_content
        self._reply.add(delta)
        match delta.WhichOneof("delta"):
            case "reasoning":
                own: Json = self._reasoning_id
                piece = _event("response.reasoning_text.delta", delta=delta.reasoning, item_id=own)
                return [*([] if had_reasoning else self._reasoning_start()), piece]
            case "content":
                own = self._message_id
                piece = _event("response.output_text.delta", item_id=own, delta=delta.content)
                return [*([] if had_content else self._message_start()), piece]
            case "tool_call":
                return self._called(delta.tool_call)
            case None:
                return []

    def _reasoning_start(self) -> list[dict[str, Any]]:
        item: Json = {
            "id": self._reasoning_id,
            "summary": [],
            "type": "reasoning",
            "content": [],
            "encrypted_content": "",
            "status": "in_progress",
        }
        return [_event("response.output_item.added", item=item)]

    def _message_start(self) -> list[dict[str, Any]]:
        item: Json = {
            "content": [],
            "id": self._message_id,
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
        }
        part: Json = {"type": "output_text", "text": ""}
        return [
            _event("response.output_item.added", item=item),
            _event("response.content_part.added", item_id=self._message_id, part=part),
        ]

    def _called(self, piece: generation_pb2.ToolCallDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        call = self._reply.calls[-1]
        if piece.name:
            item: Json = {
                "id": f"fc_{call.call_id}",
                "arguments": "",
                "call_id": f"call_{call.call_id}",
                "name": call.name,
                "type": "function_call",
                "status": "in_progress",
            }
            events.append(_event("response.output_item.added", item=item))
        if piece.arguments_json:
            events.append(
                _event(
                    "response.function_call_arguments.delta",
                    delta=piece.arguments_json,
                    item_id=f"fc_{call.call_id}",
                )
            )
        return events

    def _items(self) -> list[Json]:
        """The items of an answer in one piece, whose members the peer orders in its own way."""
        items: list[Json] = []
        if self._reply.has_reasoning:
            items.append(self._reasoning_item() | {"status": "completed"})
        if self._reply.has_content:
            items.append(
                {
                    "content": [self._text_part()],
                    "id": self._message_id,
                    "role": "assistant",
                    "status": "completed",
                    "type": "message",
                }
            )
        return [*items, *(_call_item(call) for call in self._reply.calls)]

    def _stream_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if self._reply.has_reasoning:
            items.append(self._reasoning_item())
        if self._reply.has_content:
            items.append(
                {
                    "type": "message",
                    "status": "completed",
                    "id": self._message_id,
                    "content": [self._text_part()],
                    "role": "assistant",
                }
            )
        return [*items, *(_call_item(call) for call in self._reply.calls)]

    def _reasoning_item(self) -> dict[str, Any]:
        return {
            "id": self._reasoning_id,
            "summary": [],
            "type": "reasoning",
            "content": [{"text": self._reply.reasoning, "type": "reasoning_text"}],
            "encrypted_content": "",
        }

    def _text_part(self) -> Json:
        return {
            "type": "output_text",
            "annotations": [],
            "logprobs": [],
            "text": self._reply.content,
        }


def _call_item(call: Call) -> dict[str, Any]:
    return {
        "id": f"fc_{call.call_id}",
        "type": "function_call",
        "status": "completed",
        "arguments": call.arguments_json,
        "call_id": f"call_{call.call_id}",
        "name": call.name,
    }


def _usage(outcome: Outcome) -> Json:
    finished = outcome.finished
    return {
        "input_tokens": finished.prompt_tokens,
        "output_tokens": finished.completion_tokens,
        "total_tokens": finished.completion_tokens + finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def _event(name: str, **members: Json) -> dict[str, Any]:
    return {"event": name, "data": {"type": name, **members}}

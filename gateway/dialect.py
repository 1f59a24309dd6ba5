"""What a dialect of the completion API adds to the common course of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvarts.v1 import generation_pb2

from gateway.peer_json import Json
from gateway.reply import ChatDelta, with_ids
from gateway.run import Sample
from gateway.sse import Framing
from gateway.timings import Timings


@dataclass(frozen=True)
class Step:
    """A token of a stream. `timings` and `probability` are None where the peer leaves them out."""

    sample: Sample
    chunk: generation_pb2.Chunk
    timings: Timings | None
    probability: Json

    @property
    def deltas(self) -> Sequence[ChatDelta]:
        """What the token added to a chat's message."""
        return with_ids(self.chunk.chat_deltas)


@dataclass(frozen=True)
class Outcome:
    """A complete sample: everything that any dialect's answer can show.

    At the end of a stream, which has sent the rest, `tokens` and `probabilities` are empty, `text` is
    what was withheld until then, and `deltas` are what the end added to a chat's message.
    `prompt_text` is "" unless the dialect asked for it.
    """

    sample: Sample
    finished: generation_pb2.Finished
    text: str
    tokens: Sequence[int]
    probabilities: Sequence[Json]
    prompt_text: str
    deltas: Sequence[ChatDelta]
    timings: Timings


class Dialect(Protocol):
    """The bodies of one family of routes."""

    @property
    def needs_prompt_text(self) -> bool:
        """Whether an answer shows the prompt as text, which is made for it."""
        ...

    @property
    def framing(self) -> Framing:
        """How events are written in a stream."""
        ...

    def step(self, step: Step) -> Sequence[Json]:
        """The events of one token."""
        ...

    def progress(
        self, sample: Sample, progress: generation_pb2.Progress, timings: Timings | None
    ) -> Sequence[Json]:
        """The events of one piece of the prompt."""
        ...

    def end(self, outcome: Outcome) -> Sequence[Json]:
        """The last events of one sample in a stream."""
        ...

    def whole(self, outcomes: Sequence[Outcome]) -> Json:
        """The answer in one piece; there is at least one sample."""
        ...


def progress_json(progress: generation_pb2.Progress) -> Json:
    """The `prompt_progress` object."""
    elapsed = progress.elapsed
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.processed_tokens,
        "time_ms": elapsed.seconds * 1000 + elapsed.nanos // 1_000_000,
    }

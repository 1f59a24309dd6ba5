"""A request between admission and its last event, on its slot.

Pure state: the policies beside this file decide, `engine.scheduler` acts.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.adapters.effective import BASE, EffectiveSet
from engine.errors import DeadlineExceeded
from engine.generation import Generation
from engine.pooling import StatePooling
from engine.requests import Request
from engine.scheduling.shelf import Shelf
from engine.scheduling.wishes import Save
from engine.slots.table import Slot
from engine.step import SequenceWork
from engine.types import SlotState


@dataclass(frozen=True)
class Arrival:
    """A request as it waits.

    `row` is what a pre-empted request has already done. `save` is what a warming one is for.
    """

    request: Request
    submitted_s: float
    row: Row | None = None
    save: Save | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """What has to be in the slot before it goes on: the prompt, and what was sampled."""
        prompt = self.request.prompt
        return (*prompt, *self.row.generation.tokens) if self.row else prompt


# Compared by identity: two rows are never the same request.
@dataclass(eq=False)
class Row:
    """A running (or pre-empted) request.

    `adapters` is the set that it keeps to its end. `slot` is None while pre-empted. `cached_tokens`
    is fixed at the first admission. `prompt_done` counts prompt tokens that were cached or
    evaluated, so that a second prefill after a pre-emption counts and shows nothing twice.
    `last_turn` orders the rows by when they were last evaluated; `was_passed`: a younger prompt has
    had a chunk since then. `max_held` is the most tokens that its slot may hold, `reused` how many
    were in it at the last admission. `dropped` counts tokens of the sequence that shifts took out
    of the slot since then; `is_shifted` says that one ever did. `save` is what a warming row is
    for, `shelf` what its slot held before. No step goes past the position `stop_at`, where a
    snapshot is due (None: none is). `pooling` gathers the vector of a row that generates nothing.
    """

    request: Request
    task_id: int
    generation: Generation
    submitted_s: float
    admitted_s: float
    cached_tokens: int
    prompt_done: int
    slot: Slot | None
    last_turn: int = -1
    max_held: int = 1 << 31
    reused: int = 0
    dropped: int = 0
    is_shifted: bool = False
    adapters: EffectiveSet = BASE
    was_passed: bool = False
    save: Save | None = None
    shelf: Shelf | None = None
    stop_at: int | None = None
    pooling: StatePooling | None = None

    @property
    def request_id(self) -> str:
        """The caller's name of the request."""
        return self.request.request_id

    @property
    def home(self) -> Slot:
        """The slot of a running row."""
        assert self.slot is not None, f"request {self.request_id} is not on a slot"
        return self.slot

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence: the prompt and all sampled ones."""
        return len(self.request.prompt) + len(self.generation.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens that are not yet in the slot; the logits of the last one are wanted."""
        return self.num_tokens - self.dropped - len(self.home.tokens)

    @property
    def is_decode(self) -> bool:
        """True when one token is left to evaluate, so that the row costs one decode.

        Only a chunk has hidden states, so a row that gathers them has none.
        """
        return self.num_pending == 1 and self.pooling is None

    def fits_rows(self, most: int) -> bool:
        """Whether what is pending is at most `most` tokens, which can be rows of one token.

        Those of a row with a state or a vector to gather cannot, and those that are not evaluated
        all at once.
        """
        if self.pooling is not None or self.home.state_id:
            return False
        return self.num_pending <= most and self.next_length(most) == self.num_pending

    @property
    def is_new(self) -> bool:
        """True until its first token was sampled."""
        return not self.generation.tokens

    @property
    def state(self) -> SlotState:
        """What the row's slot shows."""
        return SlotState.DECODE if self.generation.tokens else SlotState.PREFILL

    def tokens(self, start: int, end: int) -> list[int]:
        """Returns the tokens start .. end - 1 of the whole sequence."""
        prompt, sampled = self.request.prompt, self.generation.tokens
        split = len(prompt)
        head = list(prompt[start:end]) if start < split else []
        return head + sampled[max(0, start - split) : max(0, end - split)]

    def shift(self, num_tokens: int) -> None:
        """Notes that the slot has lost so many tokens of the sequence."""
        self.dropped += num_tokens
        self.is_shifted = True

    @property
    def _next(self) -> int:
        """Where in the sequence the next token to evaluate is; behind a shift, not its position."""
        return len(self.home.tokens) + self.dropped

    def start_again(self) -> None:
        """Forgets what it had gathered of its prompt, which will be evaluated anew."""
        if self.pooling is not None:
            self.pooling = self.pooling.again()

    def next_length(self, max_tokens: int) -> int:
        """Returns how many tokens the next step takes, all under the same adapters."""
        start = self._next
        room = self.max_held - len(self.home.tokens)
        end = min(start + min(max_tokens, room), self.num_tokens)
        if self.stop_at is not None:
            end = min(end, self.stop_at)
        return self.adapters.span_end(start, end) - start

    def work(self, max_tokens: int) -> SequenceWork:
        """Returns the next step's work of this row, of at most `max_tokens` tokens."""
        start = self._next
        end = start + self.next_length(max_tokens)
        return SequenceWork(
            tokens=self.tokens(start, end),
            start=start - self.dropped,
            pages=tuple(self.home.pages),
            wants_logits=end == self.num_tokens and self.pooling is None,
            wants_hidden=self.pooling is not None,
            window_pages=tuple(self.home.window.page_ids),
            adapters=self.adapters.at(start),
            state_id=self.home.state_id,
        )


def deadline_error(request: Request, submitted_s: float) -> DeadlineExceeded:
    """Gives the time that the caller allowed, which the caller can recognise."""
    assert request.deadline_s is not None
    return DeadlineExceeded(max(0.0, request.deadline_s - submitted_s))

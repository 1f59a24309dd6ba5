"""Rows without an engine, for tests of one policy."""

from __future__ import annotations

from engine.generation import Generation
from engine.requests import Request
from engine.scheduling.row import Row
from engine.slots.table import Slot
from tests.fake_text import FakeTokenizer, GreedyChain, PlainText


def make_row(
    *,
    task_id: int,
    prompt_tokens: int = 3,
    sampled: tuple[int, ...] = (),
    held: int = 0,
    last_turn: int = -1,
) -> Row:
    """A row on its own slot, which holds the first `held` tokens of its sequence."""
    request = Request(f"r{task_id}", tuple(range(10, 10 + prompt_tokens)))
    generation = Generation(
        request,
        chain=GreedyChain({}),
        text=PlainText(()),
        tokenizer=FakeTokenizer(),
        context_tokens=256,
    )
    generation.tokens += sampled
    sequence = [*request.prompt, *sampled]
    return Row(
        request=request,
        task_id=task_id,
        generation=generation,
        submitted_s=0.0,
        admitted_s=0.0,
        cached_tokens=0,
        prompt_done=min(held, prompt_tokens),
        slot=Slot(task_id, tokens=sequence[:held], pages=[task_id + 1]),
        last_turn=last_turn,
    )

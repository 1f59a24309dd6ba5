"""What a request needs to run, made when it is admitted for the first time."""

from __future__ import annotations

from engine.adapters.effective import EffectiveSet
from engine.generation import Generation
from engine.pooling import StatePooling
from engine.scheduling.parts import SchedulerParts
from engine.scheduling.row import Arrival, Row


def begin_row(
    parts: SchedulerParts,
    arrival: Arrival,
    adapters: EffectiveSet,
    seed: int,
    context_tokens: int,
) -> Row:
    """Returns a row without a slot and a number, of which nothing is cached yet.

    `seed` is the effective one, `context_tokens` the context of a slot. Raises whatever a sampler
    chain or a text stream raises.
    """
    request = arrival.request
    generation = Generation(
        request,
        chain=parts.begin_chain(request, seed),
        text=parts.begin_text(request.stop),
        tokenizer=parts.tokenizer,
        context_tokens=None if parts.shifts else context_tokens,
    )
    return Row(
        request=request,
        adapters=adapters,
        task_id=-1,
        generation=generation,
        submitted_s=arrival.submitted_s,
        admitted_s=parts.clock(),
        cached_tokens=0,
        prompt_done=0,
        slot=None,
        save=arrival.save,
        # The last token of a generation is never evaluated.
        max_held=context_tokens - (0 if request.pooling else 1),
        pooling=StatePooling(request.pooling, parts.head) if request.pooling else None,
    )

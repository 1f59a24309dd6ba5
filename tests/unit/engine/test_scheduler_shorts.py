"""Prompts of a few tokens: several begin in one step, and each says what it says alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.errors import EngineFault
from engine.step import PoolLost, StepBatch
from engine.types import SlotState
from tests.unit.engine.drive import A, B, Drive, ask, solo

WINDOW = 6


def has_shorts(batch: StepBatch) -> bool:
    """Whether two rows of a step are of one sequence."""
    pages = [tuple(work.pages) for work in batch.decodes]
    return len(set(pages)) < len(pages)


def test_eight_short_prompts_begin_in_fewer_steps_than_prompts() -> None:
    drive = Drive(num_slots=8, max_decodes=8, kv_pages=64)
    prompts = {f"r{i}": [A, B, 40 + i] for i in range(8)}
    for name, prompt in prompts.items():
        drive.engine.submit(ask(name, prompt, 9))
    begun: list[int] = []
    for _ in range(4):
        drive.steps()
        begun.append(sum(bool(drive.tokens(name)) for name in prompts))
    # Two have room in eight rows and a third is the chunk; those that have begun take a row each.
    assert begun == [3, 5, 7, 8]
    drive.rest()
    for name, prompt in prompts.items():
        assert drive.tokens(name) == solo(prompt, 9)


def test_a_short_prompt_begins_beside_a_long_ones_chunk() -> None:
    drive = Drive(num_slots=3, chunk_tokens=8)
    drive.engine.submit(ask("long", [B] * 40))
    drive.steps(2)
    drive.engine.submit(ask("short", [A, A, B], 2, progress=True))
    drive.steps()
    batch = drive.runner.batches[2]
    assert batch.chunk is not None
    assert (batch.chunk.start, len(batch.decodes)) == (16, 3)
    assert drive.progress("short") == [0, 3]
    assert drive.tokens("short") == solo([A, A, B], 1)
    drive.rest()
    chunks = [batch.chunk.start for batch in drive.runner.batches if batch.chunk]
    assert chunks == [*range(0, 40, 8)]
    assert [bool(b.chunk) for b in drive.runner.batches[:6]] == [*[True] * 5, False]
    assert drive.tokens("long") == solo([B] * 40, 5)


def test_what_a_short_prompt_left_is_found_again() -> None:
    drive = Drive(num_slots=2)
    longer = [A, B, A, B, *[A] * 6]
    for name, prompt in (("short", [A, B, A, B]), ("longer", longer)):
        drive.engine.submit(ask(name, prompt, 2))
        drive.rest()
    assert has_shorts(drive.runner.batches[0])
    assert drive.started("longer").cached_tokens == 4
    assert drive.tokens("longer") == solo(longer, 2)


def test_a_short_prompt_is_evaluated_at_once() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", [A, B, A, B], 9))
    drive.steps()
    slot = drive.engine.snapshot().slots[1]
    assert (slot.state, slot.evaluated_tokens, slot.decoded_tokens) == (SlotState.DECODE, 4, 1)
    assert drive.engine.snapshot().counters.prompt_tokens_evaluated == 4


@pytest.mark.parametrize("cause", [MemoryError("out of memory"), PoolLost("reset")])
def test_a_failing_step_ends_its_short_prompts(cause: Exception) -> None:
    drive = Drive(num_slots=2)
    prompts = {"a": [A, B, A], "b": [B, B]}
    for name, prompt in prompts.items():
        drive.engine.submit(ask(name, prompt))
    drive.runner.fail_with = cause
    drive.steps()
    assert has_shorts(drive.runner.batches[0])
    for name in prompts:
        error = drive.error(name)
        assert isinstance(error, EngineFault)
        assert error.__cause__ is cause
    for name, prompt in prompts.items():
        drive.engine.submit(ask(f"{name} again", prompt))
    drive.rest()
    for name, prompt in prompts.items():
        assert drive.started(f"{name} again").cached_tokens == 0
        assert drive.tokens(f"{name} again") == solo(prompt, 5)


def test_a_short_prompt_whose_logits_are_not_finite_fails_alone() -> None:
    drive = Drive(num_slots=3)
    drive.runner.poison = (B, A)
    prompts = {"good": [A, A, A], "bad": [B, A, A], "better": [B, B]}
    for name, prompt in prompts.items():
        drive.engine.submit(ask(name, prompt))
    drive.steps()
    (batch,) = drive.runner.batches
    assert (len(batch.decodes), batch.chunk) == (8, None)
    assert isinstance(drive.error("bad"), EngineFault)
    drive.rest()
    for name in ("good", "better"):
        assert drive.tokens(name) == solo(prompts[name], 5)


@pytest.mark.parametrize("kind", ["plain", "windows", "states"])
def test_any_short_prompts_in_any_shape_say_what_they_say_alone(kind: str) -> None:
    """With states no prompt is short: the fake runner would take rows of one as a mistake."""
    window = WINDOW if kind == "windows" else None
    num_preempted, num_with_shorts, num_reused = 0, 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        num_slots = rng.randint(1, 8)
        drive = Drive(
            num_slots=num_slots,
            max_decodes=rng.randint(1, 10),
            chunk_tokens=rng.choice((1, 2, 3, 5, 16)),
            kv_pages=rng.randint(6, 6 * num_slots + 6),
            context_tokens=24,
            page_tokens=rng.choice((1, 2, 4)) if kind == "plain" else 4,
            window=window,
            swa_evict_interval=rng.choice((1, 3, 8)),
            mamba_slots=num_slots + 4 if kind == "states" else None,
            snapshot_interval=rng.choice((4, 8)),
        )
        pool_tokens = drive.runner.num_pages * drive.runner.page_tokens
        asked: dict[str, tuple[Sequence[int], int]] = {}
        for i in range(24):
            # Few different tokens, so that prompts begin with each other.
            prompt = rng.choices((A, B), k=rng.randint(1, min(9, pool_tokens - 1)))
            count = rng.randint(1, min(8, pool_tokens - len(prompt)))
            asked[f"r{i}"] = prompt, count
            drive.engine.submit(ask(f"r{i}", prompt, count))
            drive.steps(rng.choice((0, 0, 0, 1, 2)))
        drive.rest()
        for name, (prompt, count) in asked.items():
            assert drive.tokens(name) == solo(prompt, count, window), (seed, name)
            num_reused += 0 < drive.started(name).cached_tokens < len(prompt) - 1
        num_preempted += drive.engine.snapshot().counters.preemptions
        num_with_shorts += sum(map(has_shorts, drive.runner.batches))
    assert num_preempted
    assert num_reused
    assert bool(num_with_shorts) == (kind != "states")

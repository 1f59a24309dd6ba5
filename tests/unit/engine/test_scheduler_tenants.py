"""Tenants beside one another: a share for each, whatever the others ask for."""

from __future__ import annotations

import pytest

from engine.types import CacheSource, Started
from tests.unit.engine.drive import A, B, Drive, ask, solo


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_flood_of_long_prompts_leaves_another_tenant_its_share(num_slots: int) -> None:
    """Check 38: 200 long prompts wait when the other comes, and more of them run than there are slots."""
    drive = Drive(num_slots=num_slots, context_tokens=128, kv_pages=40 * num_slots, chunk_tokens=32)
    for index in range(200):
        drive.engine.submit(ask(f"flood{index}", [A + index % 20] * 90, 2, tenant="b"))
    drive.steps(5)
    prompts = [[B + index] * 9 for index in range(10)]
    for index, prompt in enumerate(prompts):
        drive.engine.submit(ask(f"own{index}", prompt, 3, tenant="a"))
    before = _num_started(drive, "flood")
    drive.rest(limit=20_000)
    order = [name for name, event in drive.events if isinstance(event, Started)]
    for index, prompt in enumerate(prompts):
        assert drive.tokens(f"own{index}") == solo(prompt, 3)
        floods = sum(name.startswith("flood") for name in order[: order.index(f"own{index}")])
        # Turn by turn: of the flood no more began meanwhile than of the other, and what had a turn.
        assert floods - before <= index + 1
    assert _num_started(drive, "flood") == 200


def test_the_same_prompt_of_another_tenant_is_read_again() -> None:
    drive = Drive()
    prompt = [A] * 30
    for tenant in ("a", "b", "a", "b"):
        name = f"{tenant}{len(drive.events)}"
        drive.engine.submit(ask(name, prompt, 2, tenant=tenant))
        drive.rest()
        started = drive.started(name)
        assert drive.tokens(name) == solo(prompt, 2)
        is_known = any(event is not started and n[0] == tenant for n, event in _starts(drive))
        assert started.cached_tokens == (29 if is_known else 0)


@pytest.mark.parametrize(("kv_pages", "source"), [(90, CacheSource.INDEX), (20, CacheSource.HOST)])
def test_eight_conversations_on_two_slots_keep_their_own_prefixes(
    kv_pages: int, source: CacheSource
) -> None:
    """Each turn reuses all of the turn before, wherever that lies by then."""
    drive = Drive(
        num_slots=2, context_tokens=512, kv_pages=kv_pages, page_tokens=16, host_cache_bytes=None
    )
    histories = [[A + client] * 70 for client in range(8)]
    sources = set[CacheSource]()
    for turn in range(4):
        asked: list[tuple[str, list[int]]] = []
        for client, history in enumerate(histories):
            prompt = [*history, B + 10 + turn, A + client]
            asked.append((f"c{client}t{turn}", prompt))
            drive.engine.submit(ask(*asked[-1], 6))
        drive.rest(limit=5000)
        for client, (name, prompt) in enumerate(asked):
            started = drive.started(name)
            assert drive.tokens(name) == solo(prompt, 6), "another's text"
            # All that the last turn evaluated: its prompt, and its answer but for the last token.
            assert started.cached_tokens == (len(histories[client]) - 1 if turn else 0)
            sources.add(started.cache_source)
            histories[client] = [*prompt, *drive.tokens(name)]
    assert sources == {CacheSource.NONE, source}


def _num_started(drive: Drive, prefix: str) -> int:
    return sum(name.startswith(prefix) for name, _ in _starts(drive))


def _starts(drive: Drive) -> list[tuple[str, Started]]:
    return [(name, event) for name, event in drive.events if isinstance(event, Started)]

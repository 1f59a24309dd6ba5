"""Requests for vectors through the real scheduler over the fake device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import BatchOverflow, ContextOverflow, InvalidField, NotSupported
from engine.requests import Pooling, Request
from engine.types import CancelCause, Embedded
from tests.unit.engine.drive import Drive, ask, solo

PROMPT = tuple(range(60, 70))


def embed(name: str, prompt: tuple[int, ...] = PROMPT, pooling: Pooling = Pooling.NONE) -> Request:
    return replace(ask(name, prompt, cache_prompt=False), pooling=pooling)


def vectors(drive: Drive, name: str) -> np.ndarray:
    (event,) = [event for event in drive.of(name) if isinstance(event, Embedded)]
    assert event is drive.of(name)[-1]
    return np.frombuffer(event.values, "<f4").reshape(event.num_rows, event.dimension)


def expected(prompt: tuple[int, ...]) -> np.ndarray:
    """The fake device's states: each token, its position, one."""
    return np.stack([prompt, np.arange(len(prompt)), np.ones(len(prompt))], axis=1)


@pytest.mark.parametrize("length", [1, 2, 10, 16])
def test_a_vector_is_of_every_token_whatever_the_chunks(length: int) -> None:
    drive = Drive(embeds=True, chunk_tokens=16)
    prompt = tuple(60 + i for i in range(length))
    drive.engine.submit(embed("e", prompt))
    drive.rest()
    assert np.array_equal(vectors(drive, "e"), expected(prompt))


def test_a_last_token_may_be_many_chunks_away() -> None:
    drive = Drive(embeds=True, chunk_tokens=4)
    prompt = tuple(60 + i % 8 for i in range(30))
    drive.engine.submit(embed("e", prompt, Pooling.LAST))
    drive.rest()
    assert np.array_equal(vectors(drive, "e"), expected(prompt)[-1:])


def test_nothing_is_kept_and_nothing_reused() -> None:
    drive = Drive(embeds=True)
    for name in ("a", "b"):
        drive.engine.submit(embed(name))
        drive.rest()
        assert drive.engine.snapshot().pools[0].free == drive.engine.snapshot().pools[0].size
    assert np.array_equal(vectors(drive, "a"), vectors(drive, "b"))
    drive.engine.submit(ask("g", PROMPT))
    drive.rest()
    assert drive.finished("g").cached_tokens == 0


def test_generations_go_on_beside_it() -> None:
    drive = Drive(embeds=True, chunk_tokens=4)
    drive.engine.submit(ask("g", (60, 61), max_tokens=8))
    drive.engine.submit(embed("e", tuple(range(60, 64)), Pooling.MEAN))
    drive.rest()
    assert drive.tokens("g") == solo((60, 61), 8)
    assert np.allclose(vectors(drive, "e"), expected(tuple(range(60, 64))).mean(0))


def test_a_cancelled_one_leaves_nothing() -> None:
    drive = Drive(embeds=True, chunk_tokens=4)
    drive.engine.submit(embed("e", tuple(range(60, 90)), Pooling.LAST))
    drive.steps(2)
    drive.engine.cancel("e", CancelCause.CLIENT)
    drive.rest()
    assert not any(isinstance(event, Embedded) for event in drive.of("e"))


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (embed("e", ()), InvalidField),
        (embed("e", PROMPT + PROMPT), BatchOverflow),
        (embed("e", (60,) * 65, Pooling.LAST), ContextOverflow),
    ],
)
def test_what_cannot_be_pooled_is_refused(request_: Request, error: type[Exception]) -> None:
    drive = Drive(embeds=True, context_tokens=64, chunk_tokens=16)
    with pytest.raises(error):
        drive.engine.submit(request_)


def test_an_engine_that_was_not_made_for_it_says_so() -> None:
    with pytest.raises(NotSupported, match="not started for them"):
        Drive().engine.submit(embed("e"))

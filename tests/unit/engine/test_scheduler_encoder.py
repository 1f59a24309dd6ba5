"""An encoder's requests through the real scheduler over the fake device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BatchOverflow, EngineFault, NotSupported
from engine.model.encoder_spec import ScoredState, ScoringSpec
from engine.model.scoring import ScoringHead
from engine.requests import AdapterScale, Pooling, Request
from engine.types import Embedded, Failed
from tests.unit.engine.drive import Drive, ask

PROMPT = tuple(range(60, 70))
HEAD = ScoringHead(
    ScoringSpec(ScoredState.FIRST, has_dense=False, num_outputs=1),
    {"cls.output.weight": np.array([[1, 10, 100]], np.float32)},
)


def encoder() -> Drive:
    return Drive(num_slots=4, chunk_tokens=16, max_chunk=16, max_texts=4, embeds=True, head=HEAD)


def embed(name: str, prompt: tuple[int, ...] = PROMPT, pooling: Pooling = Pooling.NONE) -> Request:
    return replace(ask(name, prompt, cache_prompt=False), pooling=pooling)


def vectors(drive: Drive, name: str) -> np.ndarray:
    event = drive.of(name)[-1]
    assert isinstance(event, Embedded), event
    return np.frombuffer(event.values, "<f4").reshape(event.num_rows, event.dimension)


def expected(prompt: tuple[int, ...]) -> np.ndarray:
    """The fake device's states: each token, its position, one."""
    return np.stack([prompt, np.arange(len(prompt)), np.ones(len(prompt))], axis=1)


def test_several_texts_are_one_step() -> None:
    drive = encoder()
    texts = {f"t{i}": tuple(range(60, 60 + length)) for i, length in enumerate((5, 1, 9))}
    for name, text in texts.items():
        drive.engine.submit(embed(name, text))
    drive.rest()
    (batch,) = drive.runner.batches
    assert [len(text.tokens) for text in batch.texts] == [5, 1, 9]
    for name, text in texts.items():
        assert np.array_equal(vectors(drive, name), expected(text))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=12))
def test_every_text_is_read_once_and_nothing_is_kept(lengths: list[int]) -> None:
    drive = encoder()
    for index, length in enumerate(lengths):
        drive.engine.submit(embed(f"t{index}", tuple(range(60, 60 + length)), Pooling.LAST))
    drive.rest()
    for index, length in enumerate(lengths):
        assert np.array_equal(vectors(drive, f"t{index}"), [[59 + length, length - 1, 1]])
    read = [len(text.tokens) for batch in drive.runner.batches for text in batch.texts]
    assert sorted(read) == sorted(lengths)
    (pool,) = drive.engine.snapshot().pools
    assert pool.free == pool.size


def test_scores_are_of_the_state_that_the_head_names() -> None:
    drive = encoder()
    drive.engine.submit(embed("r", PROMPT, Pooling.RANK))
    drive.rest()
    assert np.array_equal(vectors(drive, "r"), [[60 + 0 + 100]])


def test_a_fault_ends_the_texts_of_its_step_alone() -> None:
    drive = encoder()
    for name in ("a", "b", "c"):
        drive.engine.submit(embed(name, PROMPT[:8]))
    drive.runner.fail_with = RuntimeError("the device")
    drive.rest()
    for name in ("a", "b"):
        failed = drive.of(name)[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, EngineFault)
    assert np.array_equal(vectors(drive, "c"), expected(PROMPT[:8]))


@pytest.mark.parametrize("pooling", list(Pooling))
def test_no_text_is_read_in_pieces(pooling: Pooling) -> None:
    with pytest.raises(BatchOverflow):
        encoder().engine.submit(embed("long", tuple(range(60, 77)), pooling))


def test_what_an_encoder_does_not_have_is_refused_by_name() -> None:
    engine = encoder().engine
    assert engine.is_encoder
    with pytest.raises(NotSupported, match="text generation"):
        engine.submit(ask("g", PROMPT))
    with pytest.raises(NotSupported, match="adapters of an encoder"):
        engine.submit(replace(embed("a"), adapters=(AdapterScale(0, 1.0),)))
    with pytest.raises(NotSupported, match="slots of an encoder"):
        engine.erase_slot(0)
    assert not Drive().engine.is_encoder


def test_scores_need_a_head() -> None:
    with pytest.raises(NotSupported, match="no classification head"):
        Drive(embeds=True).engine.submit(embed("r", PROMPT, Pooling.RANK))

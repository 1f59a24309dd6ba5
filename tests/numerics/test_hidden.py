"""Hidden states of a chunk against the float64 decoder, on both kinds of kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.step import SequenceWork, StepBatch
from tests.ggufs import TinyLlama, write_llama
from tests.native import requires_native
from tests.numerics.reference import ReferenceDecoder
from tests.runners import open_runner

TOKENS = [1, 5, 9, 30, 31, 7, 12]


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=requires_native)])
def test_every_token_of_a_chunk_has_its_state(tmp_path: Path, is_native: bool) -> None:
    path = write_llama(tmp_path / "tiny.gguf", TinyLlama())
    runner = open_runner(path, embeds=True, is_native=is_native)
    runner.warm_up()
    expected = ReferenceDecoder(path).hidden(TOKENS)
    for start, end in ((0, 4), (4, 7)):
        work = SequenceWork(TOKENS[start:end], start, [1], wants_logits=False, wants_hidden=True)
        runner.run(StepBatch((), work))
        states = runner.hidden_states()
        assert states.shape == (end - start, expected.shape[1])
        assert np.allclose(states, expected[start:end], atol=1e-4)

"""A cache of experts of any size gives the bits of the resident model, on both paths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.runner import JaxRunner
from tests.families import FAMILIES, VOCAB, TinyExperts, write_family
from tests.native import requires_native
from tests.runners import Lane, decode, open_runner, prefill

# Biases, a dense layer in front and a shared expert among them; 8 experts in 2 to 4 layers.
MODELS = {
    "gpt-oss": FAMILIES["gpt-oss"],
    "deepseek2": replace(
        FAMILIES["deepseek2"],
        experts=TinyExperts(used=3, num_dense=1, shared=1, is_fused=True),
        keys={},
    ),
}
PATHS = [
    pytest.param(False, id="xla"),
    pytest.param(True, id="native", marks=requires_native),
]


def follow(runner: JaxRunner) -> list[npt.NDArray[np.int32]]:
    """Bits after a prompt in chunks that need every expert, and after tokens that need a few."""
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
    lane = Lane(range(1, 9))
    rows = [prefill(runner, lane, tokens[:70], 32)]
    rows += [decode(runner, lane.work([token]))[0] for token in tokens[70:]]
    return [row.full().view(np.int32).copy() for row in rows]


@pytest.mark.parametrize("is_native", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_any_size_gives_the_bits_of_the_resident_model(
    name: str, is_native: bool, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "m.gguf", MODELS[name])

    def run(expert_slots: int | None) -> list[npt.NDArray[np.int32]]:
        runner = open_runner(path, is_native=is_native, expert_slots=expert_slots)
        runner.warm_up()
        return follow(runner)

    expected = run(None)
    # The floor, and two layers less one and whole: without and with reading ahead.
    for expert_slots in (8, 15, 16):
        for found, whole in zip(run(expert_slots), expected, strict=True):
            if is_native:
                np.testing.assert_array_equal(found, whole, f"{expert_slots} slots")
            else:  # XLA may fuse the products of another program otherwise
                np.testing.assert_allclose(
                    found.view(np.float32), whole.view(np.float32), rtol=0, atol=1e-5
                )

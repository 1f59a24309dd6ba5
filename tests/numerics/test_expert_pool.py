"""A pool of experts of any size gives the bits of the resident model, on both paths, as it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from engine.errors import ModelFileError
from engine.model.expert_pool import ExpertPool
from engine.runner import JaxRunner
from engine.step import RowLogits, StepBatch
from tests.families import FAMILIES, VOCAB, TinyExperts, family_tensors, write_family
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


def pool_of(runner: JaxRunner) -> ExpertPool:
    view = cast(Any, runner)._weights.experts
    assert view is not None
    return view.pool


def resize(runner: JaxRunner, num_slots: int) -> None:
    """What a rebuild does with experts."""
    prepared = runner.prepare(replace(runner.pools.sizes, moe_cache=num_slots))
    runner.free_pools(prepared)
    runner.allocate_pools(prepared)
    runner.warm()


def bits(row: RowLogits) -> npt.NDArray[np.int32]:
    return row.full().view(np.int32).copy()


@pytest.mark.parametrize("is_native", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_goes_on_through_every_change_of_size(
    name: str, is_native: bool, tmp_path: Path
) -> None:
    runner = open_runner(write_family(tmp_path / "m.gguf", MODELS[name]), is_native=is_native)
    runner.warm_up()
    expected = follow(runner)
    ceiling = pool_of(runner).shape.ceiling
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
    lane = Lane(range(1, 9))
    found = [bits(prefill(runner, lane, tokens[:70], 32))]
    sizes = [8, 15, ceiling, 16]
    for number, token in enumerate(tokens[70:]):
        if number % 2 == 0 and sizes:
            before = runner.compiles
            was_whole = runner.pools.sizes.moe_cache == ceiling
            resize(runner, size := sizes.pop(0))
            assert pool_of(runner).num_slots == runner.pools.sizes.moe_cache == size
            is_same_program = not was_whole and size < ceiling
            assert not is_same_program or runner.compiles == before
        found.append(bits(decode(runner, lane.work([token]))[0]))
    assert not sizes
    for row, whole in zip(found, expected, strict=True):
        if is_native:
            np.testing.assert_array_equal(row, whole)
        else:
            np.testing.assert_allclose(
                row.view(np.float32), whole.view(np.float32), rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("is_native", PATHS)
def test_experts_that_still_fit_are_not_read_again(is_native: bool, tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", MODELS["gpt-oss"])
    runner = open_runner(path, is_native=is_native)
    runner.warm_up()
    pool = pool_of(runner)
    read: list[tuple[int, int]] = []
    inner = pool.store.read

    def spy(layer: int, expert: int, target: Any) -> None:
        read.append((layer, expert))
        inner(layer, expert, target)

    pool.store.read = spy  # pyright: ignore[reportAttributeAccessIssue] -- to count
    resize(runner, 12)
    kept = set(pool.store.most_used(12))
    assert len(kept) == pool.store.used == 12
    assert not read
    resize(runner, pool.shape.ceiling)
    assert len(read) == len(set(read)) == pool.shape.ceiling - 12


@pytest.mark.parametrize("is_native", PATHS)
def test_a_program_of_an_earlier_size_is_refused(is_native: bool, tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", MODELS["gpt-oss"])
    runner = open_runner(path, is_native=is_native, expert_slots=9)
    runner.warm_up()
    inside = cast(Any, runner)
    old = inside._weights
    resize(runner, 8)
    new, inside._weights = inside._weights, old
    batch = StepBatch((Lane(range(1, 9)).work([1]),), None)
    with pytest.raises(Exception, match=r"no such cache|epoch \d+ is over"):
        runner.run(batch)
    inside._weights = new
    assert runner.run(batch)[0] is not None


@pytest.mark.parametrize("is_native", PATHS)
def test_a_file_that_fails_while_the_pool_grows_is_undone_by_another_size(
    is_native: bool, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "m.gguf", MODELS["gpt-oss"])
    runner = open_runner(path, is_native=is_native, expert_slots=9)
    runner.warm_up()
    expected = follow(runner)
    pool, old = pool_of(runner), runner.pools
    inner = pool.records.read

    def fail(layer: int, expert: int, target: Any) -> None:
        raise OSError("the disk is gone")

    prepared = runner.prepare(replace(old.sizes, moe_cache=pool.shape.ceiling))
    runner.free_pools(prepared)
    pool.records.read = fail  # pyright: ignore[reportAttributeAccessIssue] -- a broken disk
    with pytest.raises(OSError, match="the disk is gone"):
        runner.allocate_pools(prepared)
    assert pool.store.used == 0
    pool.records.read = inner  # pyright: ignore[reportAttributeAccessIssue] -- it is well again
    runner.free_pools(old)
    runner.allocate_pools(old)
    for row, before in zip(follow(runner), expected, strict=True):
        np.testing.assert_array_equal(row, before)


@pytest.mark.parametrize("is_native", PATHS)
def test_an_expert_that_is_damaged_refuses_the_model_while_it_warms_up(
    is_native: bool, tmp_path: Path
) -> None:
    """Only a step that needs it reads it, and a program can say no more than that it failed."""
    name = "blk.0.ffn_down_exps.weight"
    damaged = family_tensors(MODELS["gpt-oss"])[name].copy()
    damaged[..., 0, 0] = np.nan
    path = write_family(tmp_path / "m.gguf", MODELS["gpt-oss"], {name: damaged})
    with pytest.raises(ModelFileError, match=f"tensor '{name}' has a"):
        open_runner(path, is_native=is_native, expert_slots=9).warm_up()

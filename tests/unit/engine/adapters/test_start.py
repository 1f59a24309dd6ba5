"""The adapters of the start, and the banks' size that follows from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.errors import RankTooLarge
from engine.adapters.fit import TargetModel
from engine.adapters.start import capacity_for, read_start_adapters
from engine.errors import InvalidField
from engine.types import EngineConfig, StartAdapter
from tests.adapters import TinyAdapter, write_adapter

SHAPES = {"blk.0.attn_q.weight": (16, 16)}
MODEL = TargetModel("llama", 40, SHAPES)


def config(folder: Path, *ranks: int, **changes: int | None) -> EngineConfig:
    starts: list[StartAdapter] = []
    for rank in ranks:
        path = write_adapter(folder / f"{rank}.gguf", TinyAdapter(rank=rank), SHAPES, tuple(SHAPES))
        starts.append(StartAdapter(str(path), 0.5))
    return EngineConfig(context_tokens=64, adapters=tuple(starts), **changes)  # pyright: ignore[reportArgumentType]


def test_they_are_read_in_order_and_named_by_their_paths(tmp_path: Path) -> None:
    adapters = read_start_adapters(config(tmp_path, 4, 8, 4), MODEL)
    four, eight = str(tmp_path / "4.gguf"), str(tmp_path / "8.gguf")
    assert [a.name for a in adapters] == [four, eight, f"{four}#2"]
    assert [(a.path, a.scale) for a in adapters][1] == (eight, 0.5)


def test_capacity_is_what_they_need_unless_configured(tmp_path: Path) -> None:
    two = config(tmp_path, 4, 8)
    adapters = read_start_adapters(two, MODEL)
    assert capacity_for(two, adapters, MODEL) == AdapterCapacity(2, 8)
    roomy = config(tmp_path, 4, 8, max_adapters=5)
    assert capacity_for(roomy, adapters, MODEL) == AdapterCapacity(5, 16)
    ranked = config(tmp_path, 4, 8, max_adapters=5, max_adapter_rank=32)
    assert capacity_for(ranked, adapters, MODEL) == AdapterCapacity(5, 32)
    assert capacity_for(config(tmp_path), [], MODEL).count == 0


def test_experts_have_banks_only_where_they_are_wanted(tmp_path: Path) -> None:
    """Theirs are by far the largest."""
    shapes = {**SHAPES, "blk.0.ffn_up_exps.weight": (4, 24, 16)}
    model = TargetModel("llama", 40, shapes)
    plain = config(tmp_path, 4)
    assert not capacity_for(plain, read_start_adapters(plain, model), model).has_experts
    assert capacity_for(replace(plain, adapts_experts=True), [], model).has_experts
    path = write_adapter(tmp_path / "experts.gguf", TinyAdapter(), shapes, tuple(shapes))
    one = replace(plain, adapters=(StartAdapter(str(path)),))
    assert capacity_for(one, read_start_adapters(one, model), model).has_experts


def test_too_many_and_too_large_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="2 adapters are to be loaded, 1 may be"):
        read_start_adapters(config(tmp_path, 4, 8, max_adapters=1), MODEL)
    with pytest.raises(RankTooLarge, match="has rank 8, the server takes 4 at most"):
        read_start_adapters(config(tmp_path, 4, 8, max_adapter_rank=4), MODEL)
    with pytest.raises(InvalidField, match=r"must be in \[0, 256\], got 257"):
        read_start_adapters(config(tmp_path, max_adapters=257), MODEL)
    with pytest.raises(InvalidField, match=r"must be in \[1, 512\], got 0"):
        read_start_adapters(config(tmp_path, max_adapter_rank=0), MODEL)

"""A budget of bytes at the start: what fits is arithmetic, and answers do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidField
from engine.loading import COMPILE_BYTES, Loaded, load_engine
from engine.types import EngineConfig, PoolInfo, PoolKind
from tests.families import FAMILIES, write_family
from tests.native import requires_native
from tests.unit.engine.test_loading import Inbox, generate

CONFIG = EngineConfig(
    256, num_slots=1, chunk_tokens=16, page_tokens=16, kv_dtype="f32", kernels="xla"
)
PROMPT, COUNT = (1, 2, 3, 4, 5), 6


def answer(
    path: Path, config: EngineConfig, **given: Any
) -> tuple[list[int], Loaded, dict[PoolKind, PoolInfo]]:
    inbox = Inbox()
    loaded = load_engine(path, config, inbox, **given)
    loaded.engine.start()
    tokens = [chunk.token_id for chunk in generate(loaded, inbox, PROMPT, COUNT)]
    pools = {pool.kind: pool for pool in loaded.engine.snapshot().pools}
    loaded.engine.stop()
    return tokens, loaded, pools


def test_experts_come_first_then_pages_and_the_answer_is_the_same(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["gpt-oss"], has_tokenizer=True)
    expected, whole, pools = answer(path, CONFIG)
    experts, pages, window = (
        pools[kind] for kind in (PoolKind.MOE_CACHE, PoolKind.KV, PoolKind.SWA)
    )
    shape, sizes = whole.engine.pools.split()
    assert experts.size == experts.ceiling == shape.pool(PoolKind.MOE_CACHE).most  # pyright: ignore[reportOptionalMemberAccess]
    fixed = shape.fixed_bytes(sizes)
    # The longest request takes 16 pages of 16 tokens, and there is the sink: the rest is for experts.
    budget = fixed + 17 * pages.unit_bytes + 10 * experts.unit_bytes + experts.unit_bytes // 2
    tokens, loaded, found = answer(path, replace(CONFIG, memory_budget=budget))
    assert tokens == expected
    assert found[PoolKind.SWA].size == window.size
    shape, sizes = loaded.engine.pools.split()
    left = shape.budget_bytes(sizes) - shape.needed_bytes(sizes)
    # XLA's workspace is another for experts in slots, and grows with the pages.
    assert sizes.moe_cache is not None
    assert experts.floor <= sizes.moe_cache < experts.ceiling
    assert sizes.kv is not None
    assert sizes.kv >= 16
    assert left >= 0
    assert loaded.plan.kv_pages == sizes.kv


def test_pages_take_what_a_dense_model_leaves(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["llama"], has_tokenizer=True)
    budget = 64 << 20
    _, loaded, pools = answer(path, replace(CONFIG, memory_budget=budget))
    shape, sizes = loaded.engine.pools.split()
    left = shape.budget_bytes(sizes) - shape.needed_bytes(sizes)
    assert pools[PoolKind.KV].size > 100
    # XLA's workspace grows with the pages, so that the second split is a careful one.
    assert 0 <= left < budget / 2
    assert pools[PoolKind.KV].ceiling == pools[PoolKind.KV].size + left // (
        pools[PoolKind.KV].unit_bytes
    )


@requires_native
def test_natively_nothing_is_left(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["gpt-oss"], has_tokenizer=True)
    config = replace(CONFIG, kernels="native", memory_budget=24 << 20)
    _, loaded, pools = answer(path, config)
    shape, sizes = loaded.engine.pools.split()
    left = shape.budget_bytes(sizes) - shape.needed_bytes(sizes)
    assert pools[PoolKind.MOE_CACHE].size == pools[PoolKind.MOE_CACHE].ceiling
    assert 0 <= left < pools[PoolKind.KV].unit_bytes


def test_too_little_is_refused_with_the_least_that_runs(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["gpt-oss"], has_tokenizer=True)
    message = (
        r"memory_budget: 1000 bytes are too few: .* for kv_pages 2, .*moe_cache_slots \d+ make"
    )
    with pytest.raises(InvalidField, match=message):
        load_engine(path, replace(CONFIG, memory_budget=1000), Inbox())


@requires_native
def test_a_budget_of_the_process_leaves_what_is_no_array(tmp_path: Path) -> None:
    """As many pages as beside nothing, if the budget is greater by just that."""
    path = write_family(tmp_path / "m.gguf", FAMILIES["llama"], has_tokenizer=True)
    config = replace(CONFIG, device="cpu", kernels="native", memory_budget=24 << 20)
    _, loaded, pools = answer(path, config)
    shape, sizes = loaded.engine.pools.split()
    config = replace(
        config, host_cache_bytes=3 << 20, memory_budget=(24 << 20) + COMPILE_BYTES + (3 << 20)
    )
    _, same, found = answer(path, config, resident_bytes=lambda: 0)
    assert found[PoolKind.KV].size == pools[PoolKind.KV].size
    whole, _ = same.engine.pools.split()
    own = whole.fixed_bytes(sizes) - shape.fixed_bytes(sizes)
    assert own == COMPILE_BYTES + (3 << 20)
    with pytest.raises(InvalidField, match=r"memory_budget: .* too few: \d{13} for the process"):
        load_engine(path, config, Inbox(), resident_bytes=lambda: 10**12)
    endless = replace(config, host_cache_bytes=None)
    with pytest.raises(InvalidField, match="host_cache_bytes: prefixes on the host need a limit"):
        load_engine(path, endless, Inbox(), resident_bytes=lambda: 0)

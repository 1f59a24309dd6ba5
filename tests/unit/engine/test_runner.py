from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGUFWriter

from engine.errors import InvalidField
from engine.packed_step import Bucket
from engine.runner import JaxRunner
from engine.step import DeviceSizes, PageContent, PoolLost, RowLogits, SequenceWork, StepBatch
from engine.types import PoolKind
from tests.ggufs import (
    TinyLlama,
    add_llama_keys,
    add_tokenizer,
    close,
    encode,
    llama_tensors,
    spm_tokenizer,
    write_llama,
)
from tests.runners import Lane, decode, open_runner, prefill
from tests.unit.engine.best_logits import best_by_definition

MAX_ROWS, MAX_CHUNK, PAGE, NUM_PAGES = 4, 16, 16, 40
BAD_TOKEN = 300
VOCAB = len(spm_tokenizer().tokens)


def write_model_with_a_bad_token(path: Path) -> Path:
    """A model whose logits overflow after BAD_TOKEN and after no other.

    Dimension 0 of the residual stream is that token's alone: no other embedding has it, no layer
    writes it, and the head multiplies it by almost the largest float32.
    """
    model, tokenizer = TinyLlama(), spm_tokenizer()
    tensors = llama_tensors(model, tokenizer)
    tensors["token_embd.weight"][0][:, 0] = 0
    tensors["token_embd.weight"][0][BAD_TOKEN, 0] = 10
    for layer in range(model.num_layers):
        tensors[f"blk.{layer}.attn_output.weight"][0][0] = 0
        tensors[f"blk.{layer}.ffn_down.weight"][0][0] = 0
    tensors["output.weight"][0][7, 0] = 3e38
    writer = GGUFWriter(path, "llama")
    add_llama_keys(writer, model)
    add_tokenizer(writer, tokenizer)
    for name, (values, ggml_type) in tensors.items():
        writer.add_tensor(name, encode(values, ggml_type), raw_dtype=ggml_type)
    close(writer)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_with_a_bad_token(tmp_path_factory.mktemp("runner") / "tiny.gguf")


@pytest.fixture(scope="module")
def warm_up() -> list[object]:
    """What `warm_up` of `runner` told of its progress."""
    return []


@pytest.fixture(scope="module")
def runner(path: Path, warm_up: list[object]) -> JaxRunner:
    runner = cold(path)
    runner.warm_up(lambda done, total: warm_up.append((done, total)))
    return runner


def cold(path: Path, *, max_rows: int = MAX_ROWS, max_chunk: int = MAX_CHUNK) -> JaxRunner:
    return open_runner(
        path, max_rows=max_rows, max_chunk=max_chunk, num_pages=NUM_PAGES, page_tokens=PAGE
    )


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, count).tolist()


def lane(index: int) -> Lane:
    """One of eight sequences of up to 80 tokens."""
    return Lane(range(1 + 5 * index, 6 + 5 * index))


def only(rows: Sequence[RowLogits | None]) -> RowLogits:
    (row,) = rows
    assert row is not None
    return row


# What comes back of a row.


def test_a_row_tells_the_same_of_its_logits_by_every_door(runner: JaxRunner) -> None:
    row = prefill(runner, lane(0), tokens(5), MAX_CHUNK)
    full = row.full()
    assert row.vocab_size == VOCAB
    assert full.shape == (VOCAB,)
    assert full.dtype == np.float32
    assert not full.flags.writeable
    ids, best = row.top()
    np.testing.assert_array_equal(ids, best_by_definition(full[None])[0])
    np.testing.assert_array_equal(best, full[ids])
    wanted = np.array([300, 3, 3], np.int32)
    np.testing.assert_array_equal(row.at(wanted), full[wanted])
    wide = full.astype(np.float64)
    expected = np.log(np.exp(wide - wide.max()).sum()) + wide.max()
    assert row.log_sum_exp == pytest.approx(expected, abs=1e-5)
    assert row.is_finite


def test_a_row_that_overflows_is_flagged_and_its_neighbours_are_not(runner: JaxRunner) -> None:
    rows = decode(runner, *(lane(i).work([t]) for i, t in enumerate([5, BAD_TOKEN, 6])))
    assert [row.is_finite for row in rows] == [True, False, True]
    assert not np.isfinite(rows[1].full()).all()


def test_pages_of_an_overflowed_row_harm_no_later_one(runner: JaxRunner) -> None:
    expected = prefill(runner, lane(0), tokens(3), MAX_CHUNK).full()
    pool = cast(Any, runner)._pool
    poisoned = type(pool)(jnp.full_like(pool.keys, jnp.nan), jnp.full_like(pool.values, jnp.nan))
    cast(Any, runner)._pool = poisoned
    after = prefill(runner, lane(1), tokens(3), MAX_CHUNK)
    assert after.is_finite
    np.testing.assert_array_equal(after.full(), expected)


def test_only_the_logits_asked_for_come_back(runner: JaxRunner) -> None:
    works = (lane(0).work([5], wants_logits=False), lane(1).work([5]))
    chunk = lane(2).work([5, 6], wants_logits=False)
    rows = runner.run(StepBatch(works, chunk))
    assert [row is None for row in rows] == [True, False, True]
    assert runner.run(StepBatch((), lane(3).work([5], wants_logits=False))) == [None]


# What a step may be.


def test_a_step_of_rows_and_a_chunk_equals_separate_steps(runner: JaxRunner) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 17, 33)]
    apart, mixed = [lane(i) for i in range(4)], [lane(i) for i in range(4, 8)]
    for group in (apart, mixed):
        for sequence, prompt in zip(group, prompts, strict=False):
            prefill(runner, sequence, prompt, MAX_CHUNK)
    chunk = tokens(13, seed=9)
    expected = [only(decode(runner, sequence.work([8]))) for sequence in apart[:3]]
    expected.append(only(runner.run(StepBatch((), apart[3].work(chunk)))))
    works = tuple(sequence.work([8]) for sequence in mixed[:3])
    together = runner.run(StepBatch(works, mixed[3].work(chunk)))
    for row, alone in zip(together, expected, strict=True):
        assert row is not None
        np.testing.assert_allclose(row.full(), alone.full(), rtol=0, atol=1e-5)
    # What the mixed step wrote is read by the next one.
    after = [decode(runner, *(s.work([9]) for s in group)) for group in (apart, mixed)]
    for one, other in zip(*after, strict=True):
        np.testing.assert_allclose(one.full(), other.full(), rtol=0, atol=1e-5)


def test_pages_may_lie_in_any_order(runner: JaxRunner) -> None:
    prompt = tokens(70)
    rows = [
        prefill(runner, Lane(pages), prompt, MAX_CHUNK).full()
        for pages in ([1, 2, 3, 4, 5], [NUM_PAGES, 7, 1, 30, 2])
    ]
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize(
    ("max_rows", "max_chunk", "expected"),
    [
        (1, 1, [(1, 0), (1, 1)]),
        (3, 32, [(1, 0), (2, 0), (3, 0), (3, 32)]),
        (4, 33, [(1, 0), (2, 0), (4, 0), (4, 32), (4, 33)]),
        (
            12,
            512,
            [(1, 0), (2, 0), (4, 0), (8, 0), (12, 0), (12, 32), (12, 128), (12, 512)],
        ),
    ],
)
def test_buckets_cover_every_step(
    path: Path, max_rows: int, max_chunk: int, expected: list[tuple[int, int]]
) -> None:
    runner = cold(path, max_rows=max_rows, max_chunk=max_chunk)
    assert runner.buckets() == expected
    assert (runner.max_decodes, runner.max_chunk) == (max_rows, max_chunk)


def work(
    pages: Sequence[int], held: int = 0, new: Sequence[int] = (5,), *, wants: bool = True
) -> SequenceWork:
    return SequenceWork(new, held, pages, wants)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (StepBatch((work([0]),), None), r"page ids 0\.\.0 of 40"),
        (StepBatch((work([41]),), None), r"page ids 41\.\.41 of 40"),
        (StepBatch((work([1]), work([-3, 2])), None), r"page ids -3\.\.2 of 40"),
        (StepBatch((), work([1, 99], new=[5] * 16)), r"page ids 1\.\.99 of 40"),
        (StepBatch((work([1], held=16),), None), "1 pages for positions up to 17"),
        (StepBatch((), work([], new=[5])), "0 pages for positions up to 1"),
        (StepBatch((work(range(1, 34)),), None), "33 pages for positions"),
        (StepBatch((work([1], held=-1),), None), "a first position of -1"),
        (StepBatch((work([1], new=[VOCAB]),), None), f"token ids {VOCAB}..{VOCAB} of {VOCAB}"),
        (StepBatch((), work([1], new=[5, -1])), r"token ids -1\.\.5"),
        (StepBatch((work([1]),) * 5, None), "5 rows and a chunk of 0 tokens exceeds"),
        (StepBatch((), work([1, 2], new=[5] * 17)), "chunk of 17 tokens exceeds"),
        (StepBatch((work([1], new=[5, 6]),), None), "a decode row evaluates one token"),
        (StepBatch((), work([1], new=[])), "at least one token"),
    ],
)
def test_what_no_program_can_run_is_refused_and_changes_nothing(
    runner: JaxRunner, batch: StepBatch, message: str
) -> None:
    before = prefill(runner, lane(0), tokens(4), MAX_CHUNK).full()
    with pytest.raises(ValueError, match=message):
        runner.run(batch)
    np.testing.assert_array_equal(prefill(runner, lane(0), tokens(4), MAX_CHUNK).full(), before)


def test_the_page_must_divide_the_attention_block(path: Path) -> None:
    with pytest.raises(ValueError, match="page_tokens 24 does not divide 256"):
        open_runner(path, page_tokens=24)


def test_pools_that_memory_cannot_hold_are_refused_with_their_size(path: Path) -> None:
    with pytest.raises(InvalidField, match=r"context_tokens: .* \d{13} bytes, memory is out"):
        open_runner(path, num_pages=2**30)


# What it costs.


def test_nothing_compiles_after_the_warm_up(runner: JaxRunner) -> None:
    before = runner.compiles
    for rows in range(MAX_ROWS + 1):
        for chunk in (0, 1, MAX_CHUNK):
            works = tuple(lane(i).work([5], wants_logits=i % 2 == 0) for i in range(rows))
            rest = lane(7).work(tokens(chunk)) if chunk else None
            if works or rest:
                for row in runner.run(StepBatch(works, rest)):
                    if row is not None:
                        assert row.top()[1][0] <= row.log_sum_exp
                        assert len(row.full()) == VOCAB
    assert runner.compiles == before


def test_nothing_that_serves_compiles_after_programs_were_forgotten(runner: JaxRunner) -> None:
    runner.give_back()
    before = runner.compiles
    for chunk in (1, MAX_CHUNK):
        rows = runner.run(StepBatch((lane(1).work([5]),), lane(7).work(tokens(chunk))))
        assert all(row is None or np.isfinite(row.log_sum_exp) for row in rows)
    move(runner, [1, 2, 3], [4, 5, 6])
    runner.copy_pages(PoolKind.KV, [1], [7])
    runner.move_tokens([1, 2, 3], [1, 2, 3], 5, range(12, 40))
    assert runner.compiles == before


def test_the_warm_up_tells_how_far_it_is(runner: JaxRunner, warm_up: list[object]) -> None:
    total = len(warm_up)
    assert warm_up == [(done, total) for done in range(1, total + 1)]
    assert total > len(runner.buckets()) == 4, "pages are read, written and copied too"
    assert runner.compiles >= total


def test_steps_write_into_the_pool_in_place(runner: JaxRunner) -> None:
    def address() -> int:
        return cast(Any, runner)._pool.keys.unsafe_buffer_pointer()

    before = address()
    prefill(runner, lane(0), tokens(20), MAX_CHUNK)
    decode(runner, lane(1).work([5]))
    assert address() == before


def test_no_program_copies_the_pool(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", TinyLlama(num_layers=2))
    runner = open_runner(path, max_rows=1, max_chunk=16, num_pages=4096)
    bucket = Bucket(1, 16)
    cast(Any, runner.pools)._compile(bucket)
    program: Any = runner.pools.step(bucket)
    pool: Any = cast(Any, runner)._pool
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.keys.nbytes + pool.values.nbytes
    assert memory.temp_size_in_bytes < pool.keys.nbytes / 8


# Other sizes.


def contents(runner: JaxRunner, page_ids: list[int]) -> PageContent:
    """What pages hold, in arrays of their own."""
    content = runner.read_pages(PoolKind.KV, page_ids).wait()
    return PageContent(np.array(content.keys), np.array(content.values))


def test_pools_of_another_size_hold_what_is_written_back(path: Path) -> None:
    runner = open_runner(path, max_rows=2, max_chunk=16, num_pages=12)
    runner.warm_up()
    one = lane(0)
    prefill(runner, one, tokens(20), 16)
    work = one.work([5])
    expected = only(decode(runner, work)).full()
    held, old = contents(runner, list(one.pages)), runner.pools
    prepared = runner.prepare(DeviceSizes(kv=20))
    compiles = runner.compiles
    for target in (prepared, old):
        runner.free_pools(target)
        runner.allocate_pools(target)
        runner.write_pages(PoolKind.KV, list(one.pages), held)
        runner.warm()
        assert runner.pools is target
        again = only(decode(runner, work)).full()
        np.testing.assert_array_equal(again, expected)
    with pytest.raises(ValueError, match="13"):
        runner.read_pages(PoolKind.KV, [13])
    # Empty arrays of a shape that was never seen are all that still compiles.
    assert runner.compiles <= compiles + 2


def test_pools_that_cannot_be_allocated_leave_the_old_sizes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(path, max_rows=2, max_chunk=16, num_pages=12)
    runner.warm_up()
    old, prepared = runner.pools, runner.prepare(DeviceSizes(kv=20))
    with monkeypatch.context() as patch:
        patch.setattr("engine.pool_programs.PoolPrograms.new_pages", no_memory)
        runner.free_pools(prepared)
        with pytest.raises(MemoryError):
            runner.allocate_pools(prepared)
    assert runner.pools is old
    runner.free_pools(old)
    runner.allocate_pools(old)
    prefill(runner, lane(0), tokens(20), 16)


def no_memory(*_: object) -> None:
    raise MemoryError("no memory")


# Steps that fail.


def failing(runner: JaxRunner, monkeypatch: pytest.MonkeyPatch, *, takes_pool: bool) -> None:
    """Makes every program of the runner fail, before or after it has taken the pools."""

    def instead(program: Callable[..., object]) -> Callable[..., object]:
        def fail(*given: object) -> object:
            if takes_pool:
                program(*given)
            raise RuntimeError("the device is gone")

        return fail

    programs = cast(Any, runner)._programs._steps
    for bucket, program in list(programs.items()):
        monkeypatch.setitem(programs, bucket, instead(program))


def test_a_step_that_fails_before_it_begins_loses_nothing(
    runner: JaxRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = lane(0), lane(1)
    prefill(runner, one, tokens(20), MAX_CHUNK)
    prefill(runner, other, tokens(20), MAX_CHUNK)
    expected = only(runner.run(StepBatch((one.work([5]),), None))).full()
    with monkeypatch.context() as patch:
        failing(runner, patch, takes_pool=False)
        with pytest.raises(RuntimeError, match="the device is gone") as failure:
            prefill(runner, lane(2), tokens(3), MAX_CHUNK)
    assert not isinstance(failure.value, PoolLost)
    np.testing.assert_array_equal(only(decode(runner, other.work([5]))).full(), expected)


def test_a_step_that_fails_with_the_pools_leaves_a_runner_that_can_go_on(
    runner: JaxRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prefill(runner, lane(0), tokens(20), MAX_CHUNK).full()
    compiles = runner.compiles
    with monkeypatch.context() as patch:
        failing(runner, patch, takes_pool=True)
        with pytest.raises(PoolLost, match="the device is gone"):
            prefill(runner, lane(1), tokens(3), MAX_CHUNK)
    pool: Any = cast(Any, runner)._pool
    assert not np.asarray(pool.keys).any()
    after = prefill(runner, lane(0), tokens(20), MAX_CHUNK).full()
    np.testing.assert_array_equal(after, expected)
    assert runner.compiles == compiles


# Pages.


def move(runner: JaxRunner, sources: list[int], targets: list[int]) -> None:
    """Carries pages through the host, piece by piece."""
    step = runner.transfer_pages
    for first in range(0, len(sources), step):
        content = runner.read_pages(PoolKind.KV, sources[first : first + step]).wait()
        runner.write_pages(PoolKind.KV, targets[first : first + step], content)


def test_a_sequence_goes_on_in_the_pages_that_it_was_carried_to(runner: JaxRunner) -> None:
    cold, there = lane(0), lane(3)
    prefill(runner, cold, tokens(40), MAX_CHUNK)
    compiles = runner.compiles
    move(runner, list(cold.pages[:3]), list(there.pages[:3]))
    copied = Lane(lane(5).pages, list(cold.held))
    runner.copy_pages(PoolKind.KV, cold.pages[:3], copied.pages[:3])
    there.held += cold.held
    expected = only(decode(runner, cold.work([5]))).full()
    for warm in (there, copied):
        np.testing.assert_array_equal(only(decode(runner, warm.work([5]))).full(), expected)
    assert runner.compiles == compiles


def test_a_write_that_fails_with_the_pools_leaves_a_runner_that_can_go_on(
    runner: JaxRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill(runner, lane(0), tokens(20), MAX_CHUNK)
    content = runner.read_pages(PoolKind.KV, [1]).wait()
    page_io: Any = runner.pools.page_io
    write = page_io.write

    def fail(*given: object) -> object:
        write(*given)
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(page_io, "write", fail)
        with pytest.raises(PoolLost, match="the device is gone"):
            runner.write_pages(PoolKind.KV, [2], content)
    assert not runner.read_pages(PoolKind.KV, [1]).wait().keys.any()


def test_a_moved_token_has_the_keys_of_its_new_position(runner: JaxRunner) -> None:
    """In the first layer they depend on the token and on its position, and on nothing else."""
    whole, cut = lane(0), lane(1)
    sequence = tokens(40)
    prefill(runner, whole, sequence, MAX_CHUNK)
    prefill(runner, cut, [*sequence[:5], *sequence[12:]], MAX_CHUNK)
    compiles = runner.compiles
    assert runner.can_move_tokens
    runner.move_tokens(whole.pages[:3], whole.pages[:3], 5, range(12, 40))
    moved, evaluated = (
        runner.read_pages(PoolKind.KV, one.pages[:3]).wait() for one in (whole, cut)
    )
    np.testing.assert_allclose(moved.keys[0, :33], evaluated.keys[0, :33], atol=2e-5)
    np.testing.assert_allclose(moved.values[0, :33], evaluated.values[0, :33], atol=1e-6)
    # Deeper layers have seen the tokens that are gone.
    assert np.abs(moved.values[1, 12:33] - evaluated.values[1, 12:33]).max() > 1e-3
    assert runner.compiles == compiles


def test_a_bad_page_id_changes_nothing(runner: JaxRunner) -> None:
    with pytest.raises(ValueError, match=r"page ids 41\.\.41 of a kv pool of 40"):
        runner.copy_pages(PoolKind.KV, [1], [NUM_PAGES + 1])
    assert runner.page_layout(PoolKind.KV).num_layers == TinyLlama().num_layers


def compile_something(length: int) -> None:
    jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((length,), jnp.float32)).compile()


def test_a_runner_counts_until_it_is_closed(path: Path) -> None:
    runner, other = cold(path), cold(path)
    before = runner.compiles
    compile_something(length=41)
    assert runner.compiles == other.compiles > before
    runner.close()
    runner.close()
    count = runner.compiles
    compile_something(length=42)
    assert runner.compiles == count < other.compiles


def test_a_runner_that_is_dropped_leaves_nothing_behind(path: Path) -> None:
    runner = cold(path)
    weights = weakref.ref(cast(Any, runner)._weights.arena)
    counter = weakref.ref(cast(Any, runner)._compiles)
    del runner
    gc.collect()
    assert weights() is None
    assert counter() is None

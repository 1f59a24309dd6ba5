"""The whole engine path of the llama family against an independent decoder in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from engine.runner import JaxRunner
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
from tests.numerics.reference import ReferenceDecoder
from tests.runners import Lane, decode, logprobs, open_runner, prefill

# Natural log-probabilities, everything else in f32.
TOLERANCE = 1e-4
# An f16 cache rounds keys and values to 11 bits; logits of standard deviation 3 move by 3e-3.
F16_CACHE_TOLERANCE = 1e-2
# The same sums in another order.
ORDER_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    reference: ReferenceDecoder
    runner: JaxRunner


# By kind of matrix. Between the two models: every type that llama.cpp's own quantiser mixes.
MIXED = {
    "mixed-a": {
        "token_embd": Type.Q4_0,
        "output": Type.F16,
        "attn_q": Type.Q4_1,
        "attn_k": Type.BF16,
        "attn_v": Type.Q5_0,
        "attn_output": Type.Q5_1,
        "ffn_gate": Type.Q8_0,
        "ffn_up": Type.Q2_K,
        "ffn_down": Type.Q3_K,
    },
    "mixed-b": {
        "token_embd": Type.Q6_K,
        "attn_q": Type.Q4_K,
        "attn_k": Type.Q5_K,
        "attn_v": Type.Q6_K,
        "attn_output": Type.F32,
        "ffn_gate": Type.IQ4_NL,
        "ffn_up": Type.IQ4_XS,
        "ffn_down": Type.MXFP4,
    },
}
MODELS = {
    # One K/V head, a head of its own, frequency factors.
    "mixed-a": TinyLlama(width=256, hidden=256, num_kv_heads=1, has_rope_freqs=True, seed=1),
    # As many K/V heads as heads, a tied head, positions scaled, every bias.
    "mixed-b": TinyLlama(
        width=256, hidden=512, num_kv_heads=4, rope_scale=4.0, tied_head=True, seed=2
    ),
}


def write_mixed(path: Path, model: TinyLlama, types: Mapping[str, Type], *, biases: bool) -> Path:
    """A model whose matrices have a type per kind."""
    tokenizer, rng = spm_tokenizer(), np.random.default_rng(7)
    writer = GGUFWriter(path, "llama")
    add_llama_keys(writer, model)
    add_tokenizer(writer, tokenizer)
    for name, (values, ggml_type) in llama_tensors(model, tokenizer).items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        ggml_type = types.get(kind, ggml_type)
        if model.tied_head and kind == "token_embd":
            values = values * np.float32(3 * model.width**-0.5)  # logits of standard deviation 3
        writer.add_tensor(name, encode(values, ggml_type), raw_dtype=ggml_type)
        if biases and name.startswith("blk.") and values.ndim == 2:
            bias = rng.standard_normal(len(values), np.float32) / np.float32(4)
            writer.add_tensor(name.replace("weight", "bias"), bias, raw_dtype=Type.F32)
    close(writer)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("numerics") / "tiny.gguf", TinyLlama(num_layers=3))


@pytest.fixture(scope="module")
def case(tiny: Path) -> Case:
    runner = open_runner(tiny, max_rows=8)
    runner.warm_up()
    return Case(ReferenceDecoder(tiny), runner)


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, count).tolist()


def lane(index: int = 0, num_pages: int = 10) -> Lane:
    return Lane(range(1 + index * num_pages, 1 + (index + 1) * num_pages))


def assert_close(
    actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], tolerance: float = TOLERANCE
) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def follow(runner: JaxRunner, tokens: list[int], *, num_prefill: int) -> npt.NDArray[np.float64]:
    """Log-probabilities after the prefill and after each token decoded behind it."""
    sequence = lane()
    rows = [prefill(runner, sequence, tokens[:num_prefill], runner.max_chunk)]
    rows += [decode(runner, sequence.work([token]))[0] for token in tokens[num_prefill:]]
    return np.stack([logprobs(row) for row in rows])


def test_every_token_has_the_logprobs_of_the_definition(case: Case) -> None:
    tokens = prompt(60)
    assert_close(follow(case.runner, tokens, num_prefill=1), case.reference.logprobs(tokens))


@pytest.mark.parametrize("name", MIXED)
def test_every_type_and_variant_has_the_logprobs_of_the_definition(
    name: str, tmp_path: Path
) -> None:
    path = write_mixed(tmp_path / "m.gguf", MODELS[name], MIXED[name], biases=name == "mixed-b")
    runner = open_runner(path, max_chunk=16)
    runner.warm_up()
    tokens = prompt(40)
    assert_close(
        follow(runner, tokens, num_prefill=30), ReferenceDecoder(path).logprobs(tokens)[29:]
    )


def test_an_f16_cache_moves_them_a_little(tiny: Path, case: Case) -> None:
    runner = open_runner(tiny, kv_dtype="f16")
    runner.warm_up()
    tokens = prompt(60)
    moved = follow(runner, tokens, num_prefill=40)
    exact = case.reference.logprobs(tokens)[39:]
    assert_close(moved, exact, F16_CACHE_TOLERANCE)
    assert np.abs(moved - exact).max() > TOLERANCE, "the cache is f32"


@pytest.mark.parametrize("chunk", [1, 3, 16, 31, 32])
def test_the_size_of_the_chunks_does_not_matter(case: Case, chunk: int) -> None:
    tokens = prompt(70)
    chunked = logprobs(prefill(case.runner, lane(), tokens, chunk))
    assert_close(chunked, case.reference.logprobs(tokens)[-1])
    whole = logprobs(prefill(case.runner, lane(1), tokens, 32))
    assert_close(chunked, whole, ORDER_TOLERANCE)


def test_prompts_that_pass_a_block_of_the_walk_are_whole(case: Case) -> None:
    tokens = prompt(261)
    sequence = lane(num_pages=17)
    prefill(case.runner, sequence, tokens[:253], 32)
    expected = case.reference.logprobs(tokens)
    for position in range(253, 261):
        (row,) = decode(case.runner, sequence.work([tokens[position]]))
        assert_close(logprobs(row), expected[position])


def test_a_row_is_the_same_alone_and_among_eight(case: Case) -> None:
    prompts = [prompt(count, seed=count) for count in (1, 2, 15, 16, 17, 33, 60, 80)]
    alone, together = [[lane(index, num_pages=6) for index in range(8)] for _ in range(2)]
    expected: list[npt.NDArray[np.float64]] = []
    for sequence, tokens in zip(alone, prompts, strict=True):
        prefill(case.runner, sequence, tokens, 32)
        expected.append(logprobs(decode(case.runner, sequence.work([9]))[0]))
    for sequence, tokens in zip(together, prompts, strict=True):
        prefill(case.runner, sequence, tokens, 32)
    rows = decode(case.runner, *(sequence.work([9]) for sequence in together))
    for row, one, tokens in zip(rows, expected, prompts, strict=True):
        assert_close(logprobs(row), one, 1e-5)
        assert_close(logprobs(row), case.reference.logprobs([*tokens, 9])[-1])

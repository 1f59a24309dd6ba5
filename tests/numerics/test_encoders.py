"""Encoders on both kinds of kernel against the independent encoder in float64 and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.gguf.reader import GgufFile
from engine.model.architectures import read_spec
from engine.model.scoring import read_head
from engine.pooling import StatePooling, normalised
from engine.requests import Pooling
from engine.runner import JaxRunner
from engine.step import FloatArray, SequenceWork, StepBatch
from tests.encoders import VOCAB, TinyEncoder, write_encoder
from tests.native import requires_native
from tests.numerics.encoder_reference import ReferenceEncoder
from tests.runners import open_runner

MODELS = {
    "bert": TinyEncoder("bert"),
    "bert-types": TinyEncoder("bert", has_token_types=False),
    "bert-f16": TinyEncoder("bert", ggml_type=Type.F16),
    "nomic": TinyEncoder("nomic-bert", pooling=1),
}
# Components of layer-normalised states, all in f32.
TOLERANCE = 2e-5
# Of the largest component: llama.cpp's GELU is a table in half precision.
PEER_TOLERANCE = 1e-3
MAX_TEXTS, MAX_TOKENS = 4, 400
KERNELS = [False, pytest.param(True, marks=requires_native)]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyEncoder], Path]:
    folder = tmp_path_factory.mktemp("encoders")

    @cache
    def write(model: TinyEncoder) -> Path:
        return write_encoder(folder / f"{abs(hash(model))}.gguf", model)

    return write


@pytest.fixture(scope="module")
def runner_of(path_of: Callable[[TinyEncoder], Path]) -> Callable[[TinyEncoder, bool], JaxRunner]:
    """Warm runners, each made once."""

    @cache
    def make(model: TinyEncoder, is_native: bool) -> JaxRunner:
        runner = open_runner(
            path_of(model), max_rows=MAX_TEXTS, max_chunk=MAX_TOKENS, is_native=is_native
        )
        runner.warm_up()
        return runner

    return make


def read(runner: JaxRunner, *texts: Sequence[int]) -> list[FloatArray]:
    works = tuple(SequenceWork(text, 0, (), False, wants_hidden=True) for text in texts)
    assert runner.run(StepBatch((), None, works)) == [None] * len(texts)
    return [runner.hidden_states(i) for i in range(len(texts))]


def text_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("is_native", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_every_token_sees_its_whole_text(
    name: str,
    is_native: bool,
    path_of: Callable[[TinyEncoder], Path],
    runner_of: Callable[[TinyEncoder, bool], JaxRunner],
) -> None:
    runner, reference = runner_of(MODELS[name], is_native), ReferenceEncoder(path_of(MODELS[name]))
    for length in (1, 2, 31, 32, 33, 64, 129, MAX_TOKENS):
        text = text_of(length)
        (states,) = read(runner, text)
        np.testing.assert_allclose(states, reference.states(text), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_native", KERNELS)
def test_texts_of_one_step_do_not_see_each_other(
    is_native: bool, runner_of: Callable[[TinyEncoder, bool], JaxRunner]
) -> None:
    runner = runner_of(MODELS["bert"], is_native)
    texts = [text_of(length, seed=1) for length in (40, 1, 130, 95)]
    together = read(runner, *texts)
    for text, states in zip(texts, together, strict=True):
        (alone,) = read(runner, text)
        np.testing.assert_allclose(states, alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_native", KERNELS)
def test_quantised_weights_are_near_the_exact_model(
    is_native: bool,
    path_of: Callable[[TinyEncoder], Path],
    runner_of: Callable[[TinyEncoder, bool], JaxRunner],
) -> None:
    """Natively 8-bit activations, as llama.cpp's; XLA's stay f32."""
    model = TinyEncoder("bert", ggml_type=Type.Q8_0)
    text = text_of(50)
    (states,) = read(runner_of(model, is_native), text)
    limit = 0.1 if is_native else TOLERANCE
    expected = ReferenceEncoder(path_of(model)).states(text)
    np.testing.assert_allclose(states, expected, rtol=0, atol=limit)


def test_a_step_is_checked_before_it_runs(
    runner_of: Callable[[TinyEncoder, bool], JaxRunner],
) -> None:
    runner = runner_of(MODELS["bert"], False)
    with pytest.raises(ValueError, match=f"token ids 0..{VOCAB} of {VOCAB}"):
        read(runner, [0, VOCAB])
    with pytest.raises(ValueError, match="2 texts of 401 tokens"):
        read(runner, text_of(MAX_TOKENS), [0])
    with pytest.raises(ValueError, match="5 texts of 5 tokens"):
        read(runner, *[[0]] * 5)
    late = SequenceWork([1], 3, (), False)
    with pytest.raises(ValueError, match=r"positions 3\.\.4"):
        runner.run(StepBatch((), None, (late,)))


# What llama-server (0c1e57098b, `-fa off`) made of these tokens with the same files: the first
# components of the normalised vectors.
TEXTS = {"learning": [2, 5, 6, 9, 8, 3], "city": [2, 10, 52, 13, 14, 11, 53, 3]}
RECORDED = {
    ("bert", "learning"): [-0.04255, 0.17523, -0.19732, 0.0309, -0.1663, 0.15628],
    ("bert", "city"): [0.00035, 0.19817, -0.11425, -0.01142, -0.14656, 0.1481],
    ("nomic", "learning"): [-0.19474, -0.00638, 0.07497, 0.05948, -0.03254, -0.13274],
    ("nomic", "city"): [-0.16659, 0.03625, 0.10962, 0.02253, 0.0524, -0.15148],
}
POOLED = {"bert": Pooling.CLS, "nomic": Pooling.MEAN}


@pytest.mark.parametrize(("name", "text"), RECORDED)
def test_vectors_are_those_of_llama_cpp(
    name: str, text: str, runner_of: Callable[[TinyEncoder, bool], JaxRunner]
) -> None:
    pooling = StatePooling(POOLED[name])
    pooling.add(read(runner_of(MODELS[name], False), TEXTS[text])[0])
    vector = normalised(pooling.result()[0], 2)
    limit = PEER_TOLERANCE * float(np.abs(vector).max()) + 5e-6
    np.testing.assert_allclose(vector[:6], RECORDED[name, text], rtol=0, atol=limit)


HEADS = {
    "dense": TinyEncoder("bert", has_dense_head=True, num_scores=1, pooling=4),
    "mean": TinyEncoder("bert", num_scores=3, pooling=4, has_mean_head=True),
    "only-dense": TinyEncoder("bert", has_dense_head=True),
}
# Of the pairs (the machine, paris is a city) and so on, laid out as each file says.
PAIRS = [[2, 5, 6, 3, 10, 9, 13, 11], [2, 5, 6, 3, 6, 8], [2, 5, 6, 3, 15]]
RECORDED_SCORES = {
    "dense": [0.15093, 0.14085, 0.16227],
    "mean": [0.08024, -0.37903, -0.06942],
}


def scores_of(model: TinyEncoder, path: Path, states: FloatArray) -> FloatArray:
    with GgufFile.open(path) as file:
        head = read_head(read_spec(file), file)
    assert head is not None
    pooling = StatePooling(Pooling.RANK, head)
    for part in np.split(states, [len(states) // 2]):
        pooling.add(part)
    return pooling.result()[0]


@pytest.mark.parametrize("name", HEADS)
def test_scores_are_the_heads(
    name: str,
    path_of: Callable[[TinyEncoder], Path],
    runner_of: Callable[[TinyEncoder, bool], JaxRunner],
) -> None:
    model, path = HEADS[name], path_of(HEADS[name])
    reference = ReferenceEncoder(path)
    for pair in PAIRS:
        (states,) = read(runner_of(replace(model, pooling=model.pooling), False), pair)
        exact = reference.states(pair)
        expected = reference.scores(exact.mean(0) if model.has_mean_head else exact[0])
        np.testing.assert_allclose(scores_of(model, path, states), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", RECORDED_SCORES)
def test_scores_are_those_of_llama_cpp(
    name: str,
    path_of: Callable[[TinyEncoder], Path],
    runner_of: Callable[[TinyEncoder, bool], JaxRunner],
) -> None:
    model, path = HEADS[name], path_of(HEADS[name])
    pairs = PAIRS if name == "dense" else [[*pair, 3] for pair in PAIRS]
    found = [scores_of(model, path, read(runner_of(model, False), pair)[0])[0] for pair in pairs]
    np.testing.assert_allclose(found, RECORDED_SCORES[name], rtol=0, atol=5e-4)

"""Adapters in the whole engine path against dense weights to which float64 added them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type

from engine.adapters.capacity import AdapterCapacity, Shape
from engine.adapters.content import AdapterContent
from engine.adapters.fit import TargetModel
from engine.adapters.source import read_adapter
from engine.gguf.reader import GgufFile
from engine.model.adapter_banks import adapted_shapes
from engine.model.architectures import read_spec
from engine.runner import JaxRunner
from tests.adapters import EMBEDDING, TinyAdapter, adapter_pairs, factor, write_adapter
from tests.families import FAMILIES, write_family
from tests.ggufs import TinyLlama, write_llama
from tests.numerics.recurrent_reference import RecurrentReference
from tests.numerics.reference import ReferenceDecoder
from tests.recurrent_families import write_recurrent
from tests.runners import Lane, decode, logprobs, open_runner, prefill, write_whole

TOLERANCE = 1e-4
ORDER_TOLERANCE = 2e-5
CAPACITY = AdapterCapacity(count=3, rank=8)
MAX_ROWS = 4

# Two ranks in one file, no alpha, and a file that changes a few weights only.
FIRST = TinyAdapter(rank=4, alpha=6.0, seed=1)
SECOND = TinyAdapter(rank=8, alpha=None, seed=2)
THIRD = TinyAdapter(rank=5, alpha=3.0, seed=3)
Set = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Case:
    """A model with three adapters in the places 0 to 2."""

    runner: JaxRunner
    path: Path
    shapes: Mapping[str, Shape]
    adapters: Sequence[tuple[TinyAdapter, Sequence[str]]]
    contents: Sequence[AdapterContent]
    decoder: type[ReferenceDecoder]

    def reference(self, chosen: Set) -> ReferenceDecoder:
        """The definition, with the adapters of a set added to its weights."""
        reference = self.decoder(self.path, context_tokens=512)
        inputs = reference.tensor[EMBEDDING]
        for place, scale in chosen:
            adapter, targets = self.adapters[place]
            for name, (a, b) in adapter_pairs(adapter, self.shapes, targets).items():
                wide = a.astype(np.float64), b.astype(np.float64)
                change = wide[0] @ wide[1].T if name == EMBEDDING else wide[1] @ wide[0]
                size = scale * factor(adapter, name)
                if name == EMBEDDING and "output.weight" not in reference.tensor:
                    # A tied head keeps the weights of the file.
                    reference.tensor["output.weight"] = inputs
                reference.tensor[name] = reference.tensor[name] + size * change
        return reference


def open_case(
    path: Path,
    folder: Path,
    targets: Sequence[str],
    *,
    decoder: type[ReferenceDecoder] = ReferenceDecoder,
    **options: Any,
) -> Case:
    with GgufFile.open(path) as file:
        spec = read_spec(file)
    shapes = adapted_shapes(spec)
    named = [name for name in shapes if name.removesuffix(".weight").rpartition(".")[2] in targets]
    few = [name for name in named if "ffn" in name or "qkv" in name]
    adapters = [(FIRST, named), (SECOND, named), (THIRD, few)]
    adapters = [
        (replace(adapter, architecture=spec.architecture), own) for adapter, own in adapters
    ]
    model = TargetModel(spec.architecture, spec.vocab_size, shapes)
    capacity = replace(CAPACITY, has_experts=any(len(shapes[name]) > 2 for name in named))
    layout: dict[str, Any] = {"max_rows": MAX_ROWS, "adapters": capacity}
    runner = open_runner(path, **layout | options)
    runner.warm_up()
    contents: list[AdapterContent] = []
    for place, (adapter, own) in enumerate(adapters):
        file_path = write_adapter(folder / f"{place}.gguf", adapter, shapes, own)
        contents.append(read_adapter(file_path, model, CAPACITY.rank))
        write_whole(runner, place, contents[-1])
    return Case(runner, path, shapes, adapters, contents, decoder)


LLAMA_TARGETS = (
    "token_embd",
    "output",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("adapters")
    path = write_llama(folder / "tiny.gguf", TinyLlama(num_layers=3))
    return open_case(path, folder, LLAMA_TARGETS)


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, count).tolist()


def lane(chosen: Set, index: int = 0, num_pages: int = 10) -> Lane:
    pages = range(1 + index * num_pages, 1 + (index + 1) * num_pages)
    return Lane(pages, adapters=chosen)


def follow(
    runner: JaxRunner, tokens: list[int], chosen: Set, *, num_prefill: int, index: int = 0
) -> npt.NDArray[np.float64]:
    """Log-probabilities after the prefill and after each token decoded behind it."""
    sequence = lane(chosen, index)
    rows = [prefill(runner, sequence, tokens[:num_prefill], runner.max_chunk)]
    rows += [decode(runner, sequence.work([token]))[0] for token in tokens[num_prefill:]]
    return np.stack([logprobs(row) for row in rows])


SETS: dict[str, Set] = {
    "none": (),
    "one": ((0, 1.0),),
    "half": ((1, 0.5),),
    "negative": ((0, -0.7),),
    "few weights": ((2, 2.0),),
    "two": ((0, 1.0), (1, 0.5)),
    "three": ((2, 0.3), (0, 0.6), (1, -0.4)),
}


@pytest.mark.parametrize("name", SETS)
def test_an_adapter_is_what_it_adds_to_dense_weights(case: Case, name: str) -> None:
    tokens, chosen = prompt(50), SETS[name]
    expected = case.reference(chosen).logprobs(tokens)[39:]
    got = follow(case.runner, tokens, chosen, num_prefill=40)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    if chosen:
        plain = case.reference(()).logprobs(tokens)[39:]
        assert np.abs(expected - plain).max() > 100 * TOLERANCE, "the adapter changes too little"


def test_rows_of_all_sets_in_one_step_are_each_as_alone(case: Case) -> None:
    chosen = list(SETS.values())[1 : 1 + MAX_ROWS - 1]
    chosen.append(())
    lanes = [lane(own, index) for index, own in enumerate(chosen)]
    prompts = [prompt(20 + index, seed=index) for index in range(MAX_ROWS)]
    for sequence, tokens in zip(lanes, prompts, strict=True):
        prefill(case.runner, sequence, tokens, 32)
    rows = decode(case.runner, *(sequence.work([9]) for sequence in lanes))
    for row, own, tokens in zip(rows, chosen, prompts, strict=True):
        expected = case.reference(own).logprobs([*tokens, 9])[-1]
        np.testing.assert_allclose(logprobs(row), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("phi3", ("attn_qkv", "ffn_up", "attn_output", "ffn_down", "output")),
        ("qwen3", ("attn_q", "attn_v", "attn_output", "ffn_down")),
        ("gemma3", LLAMA_TARGETS),
    ],
)
def test_fused_weights_and_other_families(
    tmp_path: Path, family: str, targets: Sequence[str]
) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES[family])
    case = open_case(path, tmp_path, targets)
    tokens, chosen = prompt(40), SETS["three"]
    expected = case.reference(chosen).logprobs(tokens)[29:]
    got = follow(case.runner, tokens, chosen, num_prefill=30)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("falcon-h1", ("ssm_in", "ssm_out", "attn_q", "attn_output", "ffn_down")),
        ("qwen3next", ("attn_qkv", "attn_gate", "ssm_ba", "ssm_out", "ffn_down_exps")),
        ("lfm2", ("in_proj", "out_proj", "ffn_up", "attn_v")),
    ],
)
def test_recurrent_layers(tmp_path: Path, family: str, targets: Sequence[str]) -> None:
    path = write_recurrent(tmp_path / "m.gguf", family)
    case = open_case(path, tmp_path, targets, decoder=RecurrentReference, max_rows=1)
    found = {name.removesuffix(".weight").rpartition(".")[2] for name in case.contents[0].pairs}
    assert found == set(targets)
    tokens, chosen = prompt(40), SETS["three"]
    expected = case.reference(chosen).logprobs(tokens)[29:]
    got = follow(case.runner, tokens, chosen, num_prefill=30)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_the_base_stays_quantised(tmp_path: Path) -> None:
    model = TinyLlama(width=64, hidden=128, ggml_type=Type.Q8_0)
    case = open_case(write_llama(tmp_path / "m.gguf", model), tmp_path, LLAMA_TARGETS)
    tokens, chosen = prompt(40), SETS["two"]
    expected = case.reference(chosen).logprobs(tokens)[29:]
    got = follow(case.runner, tokens, chosen, num_prefill=30)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_a_place_is_written_and_cleared_without_a_compile(case: Case) -> None:
    tokens, runner = prompt(30), case.runner
    runner.give_back()
    before = runner.compiles
    write_whole(runner, 0, case.contents[1])
    swapped = follow(runner, tokens, ((0, 0.5),), num_prefill=29)
    runner.clear_adapter(0)
    cleared = follow(runner, tokens, ((0, 0.5),), num_prefill=29)
    write_whole(runner, 0, case.contents[0])
    back = follow(runner, tokens, ((0, 0.5),), num_prefill=29)
    assert runner.compiles == before
    second = case.reference(((1, 0.5),)).logprobs(tokens)[28:]
    np.testing.assert_allclose(swapped, second, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        cleared, case.reference(()).logprobs(tokens)[28:], rtol=0, atol=TOLERANCE
    )
    first = case.reference(((0, 0.5),)).logprobs(tokens)[28:]
    np.testing.assert_allclose(back, first, rtol=0, atol=TOLERANCE)


def test_what_is_off_is_exactly_zero(case: Case) -> None:
    """Also where it would overflow: a row beside one that overflows is as alone."""
    tokens = prompt(20)
    quiet, loud = lane(((1, 0.5),)), lane(((0, 3e38),), 1)
    prefill(case.runner, quiet, tokens, 32)
    prefill(case.runner, loud, tokens, 32)
    row, broken = decode(case.runner, quiet.work([9]), loud.work([9]))
    assert not broken.is_finite
    expected = case.reference(((1, 0.5),)).logprobs([*tokens, 9])[-1]
    np.testing.assert_allclose(logprobs(row), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("adapters", [((3, 1.0),), ((-1, 1.0),), ((0, 1.0),) * 4])
def test_a_list_that_does_not_fit_is_refused(case: Case, adapters: Set) -> None:
    with pytest.raises(ValueError, match="adapter"):
        decode(case.runner, lane(adapters).work([5]))

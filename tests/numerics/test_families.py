"""The whole engine path of every family against the independent decoder in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from engine.runner import JaxRunner
from tests.families import (
    CONTEXT,
    FAMILIES,
    SHORT_CONTEXT,
    VOCAB,
    WINDOW,
    TinyExperts,
    TinyLatent,
    write_family,
)
from tests.numerics.reference import ReferenceDecoder
from tests.runners import Lane, decode, logprobs, open_runner, prefill

# Natural log-probabilities, everything in f32.
TOLERANCE = 1e-4
# The same sums in another order.
ORDER_TOLERANCE = 2e-5
# Of both passes over a prompt that is longer than a block of the attention walk and any window.
NUM_TOKENS, NUM_DECODED = 300, 12
PAGE = 16


# Llama has a module of its own.
MODELS = {name: model for name, model in FAMILIES.items() if name != "llama"} | {
    "phi3-long": replace(FAMILIES["phi3"], biases=("attn_qkv", "attn_output", "ffn_up")),
    "gemma3-period": replace(
        FAMILIES["gemma3"],
        num_layers=4,
        keys={
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base_swa": 500.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    # OLMo 3: plain rope in the window layers alone.
    "olmo2-yarn": replace(
        FAMILIES["olmo2"],
        keys={
            **FAMILIES["olmo2"].keys,
            "rope.scaling.type": "yarn",
            "rope.scaling.original_context_length": 128,
        },
    ),
    "llama-experts": replace(FAMILIES["llama"], experts=TinyExperts(used=2)),
    # More experts than rows of a block, and each block of one expert.
    "olmoe-many": replace(FAMILIES["olmoe"], experts=TinyExperts(used=1, count=40)),
    "qwen3moe-grouped": replace(
        FAMILIES["qwen3moe"],
        experts=TinyExperts(used=3, count=12),
        keys={"expert_group_count": 3, "expert_group_used_count": 2},
    ),
    # A base and so a ramp of its own in the window layers.
    "gpt-oss-base": replace(
        FAMILIES["gpt-oss"], keys={**FAMILIES["gpt-oss"].keys, "rope.freq_base_swa": 2000.0}
    ),
    # Of before 2025: keys and values of every head are kept; scores grow with the context alone.
    "deepseek2-unsplit": replace(
        FAMILIES["deepseek2"],
        latent=TinyLatent(query_rank=0, is_split=False),
        experts=TinyExperts(used=2, shared=1),
        keys={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    # Gate and up as one stack, softmax of the chosen; queries and keys grow with the context.
    "deepseek2-fused": replace(
        FAMILIES["deepseek2"],
        experts=TinyExperts(used=2, num_dense=2, shared=1, is_fused=True),
        keys={
            "expert_gating_func": 3,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
}
CONTEXTS = {"phi3": SHORT_CONTEXT}
WINDOWED = ["gemma2", "gemma3", "gemma3-period", "olmo2", "gpt-oss"]


@dataclass(frozen=True)
class Case:
    reference: ReferenceDecoder
    runner: JaxRunner
    tokens: list[int]
    expected: npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A warm runner of each model and its reference, made once."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> Case:
        context = CONTEXTS.get(name, CONTEXT)
        path = write_family(folder / f"{name}.gguf", MODELS[name])
        runner = open_runner(path, context_tokens=context)
        runner.warm_up()
        reference = ReferenceDecoder(path, context)
        rng = np.random.default_rng(0)
        tokens: list[int] = rng.integers(0, VOCAB, min(NUM_TOKENS, context)).tolist()
        return Case(reference, runner, tokens, reference.logprobs(tokens))

    return make


@dataclass
class FreeingLane(Lane):
    """A sequence that gives window pages back as soon as no later token of it sees them.

    Pages ahead take the ids that were freed last, so what lies behind the window is overwritten.
    """

    window: int = WINDOW
    free: list[int] = field(default_factory=lambda: list(range(6, 0, -1)))
    table: list[int] = field(default_factory=list[int])

    def window_pages(self, start: int, end: int) -> Sequence[int]:
        for page in range(max(0, start - self.window + 1) // PAGE):
            if self.table[page]:
                self.free.append(self.table[page])
                self.table[page] = 0
        while len(self.table) * PAGE < end:
            self.table.append(self.free.pop())
        return list(self.table)


def follow(case: Case, lane: Lane, chunk: int = 32) -> npt.NDArray[np.float64]:
    """Log-probabilities after the prefill and after each of the last tokens, decoded behind it."""
    tokens, count = case.tokens, NUM_DECODED
    rows = [prefill(case.runner, lane, tokens[:-count], chunk)]
    rows += [decode(case.runner, lane.work([token]))[0] for token in tokens[-count:]]
    return np.stack([logprobs(row) for row in rows])


def lane(case: Case) -> Lane:
    return Lane(range(1, -(-len(case.tokens) // PAGE) + 1))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_logprobs_of_the_definition(
    name: str, case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    actual = follow(case, lane(case))
    expected = case.expected[-NUM_DECODED - 1 :]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_every_position_of_a_window_is_right(name: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(name)
    sequence, count = lane(case), 2 * WINDOW + PAGE
    rows = [decode(case.runner, sequence.work([token]))[0] for token in case.tokens[:count]]
    actual = np.stack([logprobs(row) for row in rows])
    np.testing.assert_allclose(actual, case.expected[:count], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [7, 31])
@pytest.mark.parametrize("name", MODELS)
def test_the_size_of_the_chunks_does_not_matter(
    name: str, chunk: int, case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    whole, chunked = follow(case, lane(case)), follow(case, lane(case), chunk)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=ORDER_TOLERANCE)


@pytest.mark.parametrize("chunk", [16, 31])
@pytest.mark.parametrize("name", WINDOWED)
def test_pages_behind_the_window_are_never_read(
    name: str, chunk: int, case_of: Callable[[str], Case]
) -> None:
    case = case_of(name)
    freeing = FreeingLane(lane(case).pages)
    np.testing.assert_array_equal(follow(case, freeing, chunk), follow(case, lane(case), chunk))
    assert freeing.table.count(0) > 12, "no page was freed"

"""The acceptance runner must fail when answers differ, or its word is worth nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from engine.gguf.reader import GgufFile
from engine.types import FinishReason
from tests.accept import __main__ as accept
from tests.accept import divergence
from tests.accept.divergence import Dequantised, Divergence
from tests.accept.drift import is_quantised, judge_drift, kl
from tests.accept.excused import Excuse
from tests.accept.greedy import Answer, compare, tolerance
from tests.accept.models import Model
from tests.accept.outcome import Failure, Unsupported
from tests.accept.recordings import judge, report
from tests.ggufs import TinyLlama, write_llama
from tests.golden.replay import Result
from tests.numerics.reference import ReferenceDecoder

_LIMIT = 1e-3


def _case(**changes: Any) -> dict[str, Any]:
    case = {
        "name": "short",
        "ids": [5, 6],
        "top_ids": [[5, 7], [6, 8]],
        "top_logprobs": [[-0.1, -2.0], [-0.6934, -0.6938]],
        "stop": "limit",
    }
    return case | changes


def _answer(ids: list[int], *, first: float = -0.1, reason: str = "length") -> Answer:
    logprobs = [{5: first, 7: -2.0}, {6: -0.6934, 8: -0.6938}, {}]
    return Answer(ids, logprobs[: len(ids)], FinishReason(reason))


def test_the_same_answer_passes() -> None:
    compare(_case(), _answer([5, 6]), _LIMIT)


def test_another_token_fails() -> None:
    with pytest.raises(Failure, match="case short, step 0: token 7, expected 5"):
        compare(_case(), _answer([7, 6]), _LIMIT)


def test_either_token_of_a_tie_passes_and_ends_the_comparison() -> None:
    case = _case(ids=[5, 6, 9], top_ids=[[5, 7], [6, 8], [9, 1]])
    case["top_logprobs"] = [*case["top_logprobs"], [-0.1, -3.0]]
    compare(case, _answer([5, 8, 2]), _LIMIT)


@pytest.mark.parametrize("first", [-0.1021, -0.0979, math.nan, -math.inf])
def test_another_log_probability_fails(first: float) -> None:
    with pytest.raises(Failure, match="token 5 has log-probability"):
        compare(_case(), _answer([5, 6], first=first), _LIMIT)


def test_a_missing_candidate_fails() -> None:
    with pytest.raises(Failure, match=r"token 9 .* is not among the best"):
        compare(_case(top_ids=[[5, 9], [6, 8]]), _answer([5, 6]), _LIMIT)


def test_a_short_answer_fails() -> None:
    with pytest.raises(Failure, match=r"step 1: the answer ended \(eos\)"):
        compare(_case(), _answer([5], reason="eos"), _LIMIT)


def test_another_ending_fails() -> None:
    with pytest.raises(Failure, match="ended by eos, not limit"):
        compare(_case(), _answer([5, 6], reason="eos"), _LIMIT)
    with pytest.raises(Failure, match="ended by length, not eos"):
        compare(_case(stop="eos"), _answer([5, 6]), _LIMIT)


def test_a_step_without_a_list_is_no_tie() -> None:
    case = _case(step_index=[1], top_ids=[[6, 8]], top_logprobs=[[-0.6934, -0.6938]])
    with pytest.raises(Failure, match="step 0: token 7"):
        compare(case, _answer([7, 6]), _LIMIT)


@pytest.mark.parametrize(
    ("architecture", "is_real", "limit"),
    [
        ("llama", False, 1e-3),
        ("llama", True, 2e-3),
        ("gemma3", False, 1.5e-2),
        ("gemma3", True, 2e-2),
    ],
)
def test_tolerance(architecture: str, is_real: bool, limit: float) -> None:
    assert tolerance(architecture, Model(Path("x"), is_real)) == limit


_TOOLS = Excuse("tools")
_COUNTS = Excuse("the cache", frozenset({"cache_n", "id_slot"}))


def test_exchanges_are_excused_by_name_and_needless_excuses_are_told() -> None:
    results = [Result("plain", []), Result("tool", ["status: 501 instead of 200", "more"])]
    verdict = judge(results, {"tool": _TOOLS, "plain": _TOOLS, "gone": _TOOLS})
    assert (verdict.passed, verdict.failed) == (["plain"], {})
    assert verdict.excused == {"tool": "tools"}
    assert verdict.needless == ["plain", "gone"]


@pytest.mark.parametrize(
    ("differences", "is_excused"),
    [
        (["response.timings.cache_n: 0 instead of 4"], True),
        (["response.timings/cache_n: 0 instead of 4", "response.id_slot: 0 instead of 1"], True),
        (["response.id_slot: 0 instead of 1", "response.content: 'a' instead of 'b'"], False),
        (["response.timings: 4 prompt tokens instead of 5"], False),
        (["status: 500 instead of 200: id_slot"], False),
    ],
)
def test_an_excuse_of_some_fields_covers_no_others(
    differences: list[str], is_excused: bool
) -> None:
    assert bool(judge([Result("a", differences)], {"a": _COUNTS}).excused) == is_excused


def test_a_group_with_excused_exchanges_passes_and_says_so() -> None:
    results = [Result("plain", []), Result("tool", ["status"]), Result("other", [])]
    verdict = judge(results, {"tool": _TOOLS, "other": _TOOLS})
    assert report(verdict) == "2 of 3 exchanges, the others excused; excused in vain: other"


def test_a_group_of_excused_exchanges_alone_is_unsupported() -> None:
    results = [Result("one", ["status"]), Result("two", ["status"])]
    with pytest.raises(Unsupported, match=r"^tools$"):
        report(judge(results, {"one": _TOOLS, "two": _TOOLS}))


def test_a_differing_exchange_fails_its_group_with_the_first_difference() -> None:
    results = [Result("plain", []), Result("stop", ["response.id: 1 instead of 0", "more"])]
    expected = r"1 of 2 exchanges differ\n    stop: response.id: 1 instead of 0$"
    with pytest.raises(Failure, match=expected):
        report(judge(results, {"other group's": _TOOLS}))


def _run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["accept", str(folder)])
    return accept.main()


def test_unsupported_files_are_listed_and_broken_ones_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goldens = tmp_path / "goldens" / "http"
    goldens.mkdir(parents=True)
    server: dict[str, Any] = {"model": "none.gguf", "args": []}
    (goldens / "a.json").write_text(json.dumps({"server": server, "exchanges": []}))
    (goldens / "b.json").write_text("{")
    (goldens / "c.json").write_text(json.dumps({"model": "none.gguf", "cases": []}))
    (goldens / "d.json").write_text(json.dumps({"figures": []}))
    assert _run(tmp_path, monkeypatch) == 1
    lines = [re.sub(r"\d+\.\d s", "0 s", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "unsupported goldens/http/a.json (0 s): its model none.gguf is not here"
    assert lines[1] == "failed      goldens/http/b.json (0 s): Traceback (most recent call last):"
    assert "unsupported goldens/http/c.json (0 s): its model none.gguf is not here" in lines
    assert "unsupported goldens/http/d.json (0 s): holds figures, not answers" in lines
    assert any("adapters at random" in line for line in lines if line.startswith("unsupported"))
    assert lines[-1] == "accept: 0 passed, 1 failed, 4 unsupported"


def test_a_damaged_vocabulary_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "goldens").mkdir()
    vocabs = tmp_path / "vocabs"
    vocabs.mkdir()
    (vocabs / "v.gguf.xz").write_bytes(b"no archive")
    (vocabs / "v.gguf.inp").write_text("a\n__ggml_vocab_test__\nb\n__ggml_vocab_test__\n")
    (vocabs / "v.gguf.out").write_text("1\n2\n3\n")
    assert _run(tmp_path, monkeypatch) == 1
    assert "2 texts and 3 lines of ids" in capsys.readouterr().out


def test_a_folder_that_is_no_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, monkeypatch) == 1
    assert "has no goldens/" in capsys.readouterr().err


_NATIVE = {"mean_kl": 3e-3, "max_kl": 0.1, "ppl_exact": math.exp(2)}


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_divergence_near_zero_passes_beside_the_recorded_one(is_whole: bool) -> None:
    found = Divergence(np.array([0.0, 2e-5]), np.array([-1.0, -3.0]))
    said = divergence.judge("m.gguf", found, _NATIVE, 1e-4, is_whole=is_whole)
    assert said.startswith("m.gguf: 2 tokens, mean KL 1.0e-05 (llama.cpp 3.0e-03), largest 2.0e-05")
    assert ("exact perplexity 7.3891 (7.3891)" in said) == is_whole


@pytest.mark.parametrize(
    ("kl", "limit", "least"),
    [(1.1e-4, 1e-4, "0.0001"), (math.nan, 1e-4, "0.0001"), (3.1e-3, 1.0, "0.003")],
)
def test_a_divergence_above_the_limit_or_the_peers_fails(
    kl: float, limit: float, least: str
) -> None:
    found = Divergence(np.array([kl]), np.array([-2.0]))
    with pytest.raises(Failure, match=re.escape(f"the mean must be at most {least}")):
        divergence.judge("m", found, _NATIVE, limit, is_whole=False)


@pytest.mark.parametrize("logprob", [-2.002, -1.998, math.nan])
def test_another_exact_model_fails_where_the_whole_text_is_scored(logprob: float) -> None:
    found = Divergence(np.zeros(1), np.array([logprob]))
    with pytest.raises(Failure, match=r"must agree within 0\.001"):
        divergence.judge("m", found, _NATIVE, 1e-4, is_whole=True)


def test_a_drift_is_the_divergence_of_two_distributions() -> None:
    exact, found = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    assert kl(exact.tolist(), exact.tolist()) == 0
    assert kl(exact.tolist(), found.tolist()) == pytest.approx(0.25 * math.log(2))


def test_a_drift_is_held_against_the_peers_by_its_mean() -> None:
    assert judge_drift([0.001, 0.003], [0.002, 0.002]).startswith(
        "mean KL of the first step 2.00e-03"
    )
    for found in ([0.001, 0.0031], [math.nan]):
        with pytest.raises(Failure, match=r"llama\.cpp 2\.00e-03"):
            judge_drift(found, [0.002, 0.002])


@pytest.mark.parametrize("ggml_type", ["F32", "F16", "BF16", "Q8_0", "MXFP4"])
def test_a_file_is_quantised_by_what_it_holds(tmp_path: Path, ggml_type: str) -> None:
    model = TinyLlama(ggml_type=GGMLQuantizationType[ggml_type])
    path = write_llama(tmp_path / "m.gguf", model)
    assert is_quantised(Model(path, is_real=False)) == (ggml_type in ("Q8_0", "MXFP4"))


def test_the_exact_model_is_the_same_weights_in_f32(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "q.gguf", TinyLlama(ggml_type=GGMLQuantizationType.Q4_0))
    with GgufFile.open(path) as file:
        exact = Dequantised(file)
        assert exact.tensors.keys() == file.tensors.keys()
        for name, info in file.tensors.items():
            values = exact.raw(name).view(np.float32).reshape(exact.tensors[name].shape)
            packed = file.raw(name).reshape(*info.shape[:-1], -1)
            assert exact.tensors[name].nbytes == values.nbytes
            np.testing.assert_array_equal(values, quants.dequantize(packed, info.ggml_type))


@pytest.mark.slow
def test_a_divergence_scores_what_an_independent_model_scores(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "q.gguf", TinyLlama(ggml_type=GGMLQuantizationType.Q4_0))
    chunk = np.random.default_rng(0).integers(3, 200, 512).tolist()
    found = divergence.measure(path, [chunk])
    rows = ReferenceDecoder(path).logprobs(chunk)[256:511]
    # What lies further below the best is kept as that.
    expected = np.maximum(rows[np.arange(255), chunk[257:]], rows.max(-1) - 16)
    np.testing.assert_allclose(found.exact_logprob, expected, atol=1e-4)
    assert found.kl.shape == (255,)
    assert found.kl.max() < 1e-6

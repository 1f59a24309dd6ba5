from __future__ import annotations

import pytest

from engine.gguf.sampling import SamplingHints
from engine.requests import DEFAULT_SAMPLERS, Mirostat, Sampler, SamplingParams
from service.defaults import GenerationDefaults, with_hints

OURS = GenerationDefaults(max_tokens=7)


def sampling(hints: SamplingHints, *given: str) -> SamplingParams:
    """What a request runs under where flags set the `given` fields to what they are anyway."""
    return with_hints(GenerationDefaults(), hints, given=given).sampling


def test_a_file_that_says_nothing_changes_nothing() -> None:
    assert with_hints(OURS, SamplingHints(), given=()) == OURS


def test_the_file_comes_before_our_own_defaults() -> None:
    hints = SamplingHints(temperature=0.0, top_k=0, mirostat=Mirostat.V1)
    assert sampling(hints) == SamplingParams(temperature=0.0, top_k=0, mirostat=Mirostat.V1)


def test_flags_come_before_the_file() -> None:
    hints = SamplingHints(temperature=0.5, top_p=0.5)
    assert sampling(hints, "temperature") == SamplingParams(top_p=0.5)


def test_the_files_chain_may_use_any_spelling(caplog: pytest.LogCaptureFixture) -> None:
    hints = SamplingHints(samplers=("top-k", "Nucleus", "nonsense", "temp"))
    assert sampling(hints).samplers == (Sampler.TOP_K, Sampler.TOP_P, Sampler.TEMPERATURE)
    assert "nonsense" in caplog.text
    assert sampling(hints, "samplers").samplers == DEFAULT_SAMPLERS


def test_other_defaults_stay() -> None:
    assert with_hints(OURS, SamplingHints(top_k=1), given=()).max_tokens == 7

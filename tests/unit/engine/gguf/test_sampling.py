from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from engine.errors import ModelFileError
from engine.gguf.reader import GgufFile
from engine.gguf.sampling import SamplingHints, read_sampling
from engine.requests import Mirostat
from tests.ggufs import close, write_gguf


def hints_of(folder: Path, keys: dict[str, Any]) -> SamplingHints:
    path = write_gguf(
        folder / "m.gguf", {f"general.sampling.{name}": value for name, value in keys.items()}
    )
    with GgufFile.open(path) as file:
        return read_sampling(file.metadata)


def test_a_silent_file_has_no_hints(tmp_path: Path) -> None:
    assert set(asdict(hints_of(tmp_path, {})).values()) == {None}


def test_every_key_that_the_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_sampling_sequence("top-k;Nucleus;nonsense")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.9)
    writer.add_sampling_min_p(0.02)
    writer.add_sampling_xtc_probability(0.5)
    writer.add_sampling_xtc_threshold(0.2)
    writer.add_sampling_penalty_last_n(128)
    writer.add_sampling_penalty_repeat(1.1)
    writer.add_sampling_mirostat(2)
    writer.add_sampling_mirostat_tau(4.0)
    writer.add_sampling_mirostat_eta(0.3)
    close(writer)
    with GgufFile.open(path) as file:
        hints = read_sampling(file.metadata)
    # Floats are stored as float32: 0.6 must not become 0.6000000238.
    assert hints == SamplingHints(
        samplers=("top-k", "Nucleus", "nonsense"),
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        repeat_last_n=128,
        repeat_penalty=1.1,
        mirostat=Mirostat.V2,
        mirostat_tau=4.0,
        mirostat_eta=0.3,
    )


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        # Samplers treat what is beyond a range as its end.
        ({"temp": -1.0}, "temperature", 0.0),
        ({"top_p": 1.5}, "top_p", 1.0),
        ({"min_p": -0.5}, "min_p", 0.0),
        ({"top_k": -1.0}, "top_k", 0),
        ({"top_k": 40.0}, "top_k", 40),
        ({"penalty_last_n": 2**32 - 1}, "repeat_last_n", 2**31 - 1),
        ({"temp": 1}, "temperature", 1.0),
        ({"sequence": ""}, "samplers", None),
    ],
)
def test_values_are_brought_into_range(
    tmp_path: Path, keys: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(hints_of(tmp_path, keys), field) == value


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temp": "warm"}, r"'general\.sampling\.temp' is of type string"),
        ({"temp": float("nan")}, r"'general\.sampling\.temp' is nan"),
        ({"top_k": True}, r"'general\.sampling\.top_k' is of type bool"),
        ({"penalty_repeat": 0.0}, r"'general\.sampling\.penalty_repeat' is 0, expected above 0"),
        ({"mirostat": 3}, r"'general\.sampling\.mirostat' is 3, expected 0, 1 or 2"),
        ({"mirostat": 1.5}, r"'general\.sampling\.mirostat' is 1\.5"),
        ({"sequence": 7}, r"'general\.sampling\.sequence' is of type uint32"),
    ],
)
def test_a_value_without_a_meaning_names_its_key(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        hints_of(tmp_path, keys)

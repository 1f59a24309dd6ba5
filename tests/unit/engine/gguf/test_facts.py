from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from engine.errors import ModelFileError
from engine.gguf.facts import FileFacts, read_facts
from engine.gguf.reader import GgufFile
from tests.ggufs import random_blocks, write_gguf


def facts_of(
    folder: Path, keys: dict[str, Any], types: tuple[Type, ...] = (), **options: Any
) -> FileFacts:
    """Facts of a file with one 2 x 256 matrix of each of the types."""
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": (random_blocks(rng, t, (2, 256)), t) for i, t in enumerate(types)}
    with GgufFile.open(write_gguf(folder / "m.gguf", keys, tensors, **options)) as file:
        return read_facts(file)


def test_sizes_count_all_tensors(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, {"general.name": "Tiny"}, (Type.F32, Type.Q8_0, Type.Q4_K))
    assert facts.architecture == "llama"
    assert facts.name == "Tiny"
    assert facts.num_params == 3 * 512
    assert facts.size_bytes == 512 * 4 + 16 * 34 + 2 * 144


def test_a_file_without_a_name_or_tensors_has_facts_too(tmp_path: Path) -> None:
    assert facts_of(tmp_path, {}) == FileFacts("llama", "", "(guessed) all F32", 0, 0)


@pytest.mark.parametrize(
    ("file_type", "name"),
    [
        # The names that llama.cpp prints and its HTTP API shows.
        (LlamaFileType.ALL_F32, "all F32"),
        (LlamaFileType.MOSTLY_F16, "F16"),
        (LlamaFileType.MOSTLY_BF16, "BF16"),
        (LlamaFileType.MOSTLY_Q4_1, "Q4_1"),
        (LlamaFileType.MOSTLY_Q8_0, "Q8_0"),
        (LlamaFileType.MOSTLY_Q2_K, "Q2_K - Medium"),
        (LlamaFileType.MOSTLY_Q3_K_L, "Q3_K - Large"),
        (LlamaFileType.MOSTLY_Q4_K_M, "Q4_K - Medium"),
        (LlamaFileType.MOSTLY_Q5_K_S, "Q5_K - Small"),
        (LlamaFileType.MOSTLY_Q6_K, "Q6_K"),
        (LlamaFileType.MOSTLY_IQ4_XS, "IQ4_XS - 4.25 bpw"),
        (LlamaFileType.MOSTLY_MXFP4_MOE, "MXFP4 MoE"),
        (9999, "unknown, may not work"),
    ],
)
def test_the_files_own_type_has_llama_cpps_name(tmp_path: Path, file_type: int, name: str) -> None:
    assert facts_of(tmp_path, {"general.file_type": int(file_type)}).file_type == name


@pytest.mark.parametrize(
    ("types", "name"),
    [
        ((Type.F32, Type.Q4_0, Type.Q4_0), "(guessed) Q4_0"),
        ((Type.F32, Type.F32, Type.F16), "(guessed) all F32"),
        ((Type.Q4_K, Type.Q6_K, Type.Q4_K), "(guessed) Q4_K - Medium"),
        ((Type.Q2_K,), "(guessed) Q2_K - Medium"),
        ((Type.Q6_K,), "(guessed) Q6_K"),
        ((Type.IQ4_NL,), "(guessed) IQ4_NL - 4.5 bpw"),
    ],
)
def test_a_type_that_is_not_told_is_guessed_from_the_commonest(
    tmp_path: Path, types: tuple[Type, ...], name: str
) -> None:
    assert facts_of(tmp_path, {}, types).file_type == name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.file_type": "Q8_0"}, r"'general\.file_type' is of type string"),
        ({"general.name": 7}, r"'general\.name' is of type uint32"),
    ],
)
def test_a_fact_of_another_type_is_damage(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        facts_of(tmp_path, keys)

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType

from engine.errors import ModelFileError
from engine.gguf.reader import GgufFile
from engine.gguf.vocab import Vocab, read_vocab
from tests.ggufs import TinyLlama, bpe_tokenizer, spm_tokenizer, write_gguf, write_llama

GGML = "tokenizer.ggml."
LEAST: dict[str, Any] = {GGML + "model": "llama", GGML + "tokens": ["a", "b", "c"]}


def read(folder: Path, keys: Mapping[str, Any]) -> Vocab:
    with GgufFile.open(write_gguf(folder / "v.gguf", keys)) as file:
        return read_vocab(file.metadata)


def test_an_spm_vocabulary_is_read_whole(tmp_path: Path) -> None:
    expected = spm_tokenizer()
    with GgufFile.open(write_llama(tmp_path / "m.gguf")) as file:
        vocab = read_vocab(file.metadata)
    assert (vocab.model, vocab.pre) == ("llama", None)
    assert [token.decode() for token in vocab.tokens] == list(expected.tokens)
    assert vocab.scores is not None
    assert vocab.token_types is not None
    np.testing.assert_array_equal(vocab.scores, np.array(expected.scores, np.float32))
    np.testing.assert_array_equal(vocab.token_types, expected.types)
    assert vocab.merges == ()
    assert (vocab.bos_token, vocab.eos_token, vocab.unk_token) == (1, 2, 0)
    assert vocab.pad_token is None
    assert (vocab.add_bos, vocab.add_eos, vocab.add_space_prefix) == (True, None, True)
    assert vocab.chat_template == expected.chat_template


def test_a_bpe_vocabulary_is_read_whole(tmp_path: Path) -> None:
    expected = bpe_tokenizer()
    path = write_llama(tmp_path / "m.gguf", TinyLlama(tokenizer="bpe"))
    with GgufFile.open(path) as file:
        vocab = read_vocab(file.metadata)
    assert (vocab.model, vocab.pre) == ("gpt2", "gpt-2")
    assert [merge.decode() for merge in vocab.merges] == list(expected.merges)
    assert vocab.scores is None
    assert (vocab.bos_token, vocab.eos_token, vocab.unk_token) == (0, 2, None)
    assert (vocab.add_bos, vocab.add_space_prefix) == (False, False)


def test_what_is_absent_stays_unknown(tmp_path: Path) -> None:
    vocab = read(tmp_path, LEAST)
    assert vocab.tokens == (b"a", b"b", b"c")
    assert vocab.chat_templates == {}
    absent = {
        name: value
        for name, value in vars(vocab).items()
        if name not in ("model", "tokens", "merges", "suppress_tokens", "chat_templates")
    }
    assert set(absent.values()) == {None}


def test_every_special_id_and_flag_has_its_field(tmp_path: Path) -> None:
    ids = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "eot_token": "eot_token_id",
        "eom_token": "eom_token_id",
        "unk_token": "unknown_token_id",
        "sep_token": "seperator_token_id",
        "pad_token": "padding_token_id",
        "cls_token": "cls_token_id",
        "mask_token": "mask_token_id",
        "fim_pre_token": "fim_pre_token_id",
        "fim_suf_token": "fim_suf_token_id",
        "fim_mid_token": "fim_mid_token_id",
        "fim_pad_token": "fim_pad_token_id",
        "fim_rep_token": "fim_rep_token_id",
        "fim_sep_token": "fim_sep_token_id",
    }
    flags = {
        "add_bos": "add_bos_token",
        "add_eos": "add_eos_token",
        "add_sep": "add_sep_token",
        "add_space_prefix": "add_space_prefix",
        "remove_extra_whitespaces": "remove_extra_whitespaces",
        "lowercase": "normalizer.lowercase",
        "strip_accents": "normalizer.strip_accents",
    }
    tokens = [f"t{index}" for index in range(len(ids))]
    keys = LEAST | {GGML + "tokens": tokens}
    keys |= {GGML + name: index for index, name in enumerate(ids.values())}
    for index, name in enumerate(flags):
        vocab = read(
            tmp_path, keys | {GGML + name: i == index for i, name in enumerate(flags.values())}
        )
        assert [getattr(vocab, field) for field in ids] == list(range(len(ids)))
        assert [getattr(vocab, field) for field in flags] == [field == name for field in flags]


def test_the_older_names_of_infill_tokens_win(tmp_path: Path) -> None:
    keys = LEAST | {GGML + "prefix_token_id": 2, GGML + "fim_pre_token_id": 1}
    keys |= {GGML + "suffix_token_id": 0, GGML + "middle_token_id": 1}
    vocab = read(tmp_path, keys)
    assert (vocab.fim_pre_token, vocab.fim_suf_token, vocab.fim_mid_token) == (2, 0, 1)


def test_templates_by_name(tmp_path: Path) -> None:
    keys = LEAST | {
        "tokenizer.chat_template": "default",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "documents",
    }
    vocab = read(tmp_path, keys)
    assert vocab.chat_template == "default"
    assert vocab.chat_templates == {"tool_use": "tools", "rag": "documents"}


def test_further_tables(tmp_path: Path) -> None:
    keys = LEAST | {
        GGML + "pre": "default",
        GGML + "token_type_count": 2,
        GGML + "suppress_tokens": [2, 0],
        GGML + "scores": [3, -1, 0],
        GGML + "precompiled_charsmap": b"\x01\x02\xff",
    }
    vocab = read(tmp_path, keys)
    assert vocab.pre == "default"
    assert vocab.token_type_count == 2
    assert vocab.suppress_tokens == (2, 0)
    assert vocab.precompiled_charsmap == b"\x01\x02\xff"
    assert vocab.scores is not None
    assert vocab.scores.dtype == np.float32
    assert vocab.scores.tolist() == [3.0, -1.0, 0.0]


def test_types_that_no_one_has_defined_are_undefined(tmp_path: Path) -> None:
    vocab = read(tmp_path, LEAST | {GGML + "token_type": [TokenType.BYTE, 7, -3]})
    assert vocab.token_types is not None
    assert vocab.token_types.tolist() == [6, 0, 0]


def test_arrays_are_read_only(tmp_path: Path) -> None:
    vocab = read(tmp_path, LEAST | {GGML + "scores": [0.5] * 3, GGML + "token_type": [1] * 3})
    for array in (vocab.scores, vocab.token_types):
        assert array is not None
        assert not array.flags.writeable


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({GGML + "tokens": None}, "key 'tokenizer.ggml.tokens' is missing"),
    (
        {GGML + "tokens": [1, 2]},
        "'tokenizer.ggml.tokens' is an array of 2 int32, expected an array",
    ),
    ({GGML + "model": None}, "key 'tokenizer.ggml.model' is missing"),
    ({GGML + "model": 3}, "key 'tokenizer.ggml.model' is of type uint32, expected a string"),
    ({GGML + "bos_token_id": 3}, "key 'tokenizer.ggml.bos_token_id' is 3, allowed are 0 to 2"),
    ({GGML + "fim_pad_token_id": 9}, "'tokenizer.ggml.fim_pad_token_id' is 9, allowed are 0 to 2"),
    ({GGML + "eos_token_id": "x"}, "key 'tokenizer.ggml.eos_token_id' is of type string"),
    ({GGML + "add_bos_token": 1}, "key 'tokenizer.ggml.add_bos_token' is of type uint32"),
    ({GGML + "scores": [0.5, 0.5]}, "key 'tokenizer.ggml.scores' has 2 elements, the vocabulary 3"),
    ({GGML + "scores": [0.5, float("nan"), 0.0]}, "key 'tokenizer.ggml.scores' is NaN for token 1"),
    ({GGML + "scores": [True] * 3}, "key 'tokenizer.ggml.scores' holds bool"),
    (
        {GGML + "token_type": [1] * 4},
        "'tokenizer.ggml.token_type' has 4 elements, the vocabulary 3",
    ),
    ({GGML + "token_type": [0.5] * 3}, "key 'tokenizer.ggml.token_type' holds float32"),
    ({GGML + "merges": [1]}, "key 'tokenizer.ggml.merges' is an array of 1 int32"),
    (
        {GGML + "suppress_tokens": [0, 3]},
        "'tokenizer.ggml.suppress_tokens' holds 3, allowed are 0 to 2",
    ),
    ({GGML + "suppress_tokens": [0.5]}, "'tokenizer.ggml.suppress_tokens' holds float32"),
    ({GGML + "precompiled_charsmap": [1]}, "'tokenizer.ggml.precompiled_charsmap' holds int32"),
    ({"tokenizer.chat_template": 1}, "key 'tokenizer.chat_template' is of type uint32"),
    ({"tokenizer.chat_template.x": 1}, "key 'tokenizer.chat_template.x' is of type uint32"),
]


@pytest.mark.parametrize(("keys", "detail"), REFUSED, ids=[detail for _, detail in REFUSED])
def test_a_table_that_does_not_fit_is_refused_by_key(
    tmp_path: Path, keys: dict[str, Any], detail: str
) -> None:
    keys = {name: value for name, value in (LEAST | keys).items() if value is not None}
    with pytest.raises(ModelFileError, match=re.escape(detail)):
        read(tmp_path, keys)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", LEAST | {GGML + "tokens": ["\x7f"]})
    data = path.read_bytes()
    at = data.index(b"\x7f") - 16
    path.write_bytes(data[:at] + bytes(8) + data[at + 17 :])
    with (
        GgufFile.open(path) as file,
        pytest.raises(ModelFileError, match=r"key 'tokenizer\.ggml\.tokens' is empty"),
    ):
        read_vocab(file.metadata)

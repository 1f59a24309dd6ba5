"""The tokenizer tables of a GGUF file, checked and as they are.

Which defaults an absent flag or id has depends on the tokenizer, so absence is kept (None) and
`engine.text` decides. This module knows no tokenisation.

Source: the GGUF specification (tokenizer.ggml.*) and the keys that llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf.metadata import Metadata
from engine.gguf.strings import Strings

_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"

# llama.cpp reads the older name last, so it wins where a file has both.
_ID_KEYS: dict[str, tuple[str, ...]] = {
    "bos_token": ("bos_token_id",),
    "eos_token": ("eos_token_id",),
    "eot_token": ("eot_token_id",),
    "eom_token": ("eom_token_id",),
    "unk_token": ("unknown_token_id",),
    "sep_token": ("seperator_token_id",),
    "pad_token": ("padding_token_id",),
    "cls_token": ("cls_token_id",),
    "mask_token": ("mask_token_id",),
    "fim_pre_token": ("prefix_token_id", "fim_pre_token_id"),
    "fim_suf_token": ("suffix_token_id", "fim_suf_token_id"),
    "fim_mid_token": ("middle_token_id", "fim_mid_token_id"),
    "fim_pad_token": ("fim_pad_token_id",),
    "fim_rep_token": ("fim_rep_token_id",),
    "fim_sep_token": ("fim_sep_token_id",),
}
_FLAG_KEYS: dict[str, str] = {
    "add_bos": "add_bos_token",
    "add_eos": "add_eos_token",
    "add_sep": "add_sep_token",
    "add_space_prefix": "add_space_prefix",
    "remove_extra_whitespaces": "remove_extra_whitespaces",
    "lowercase": "normalizer.lowercase",
    "strip_accents": "normalizer.strip_accents",
}


@dataclass(frozen=True, eq=False)
class Vocab:
    """A tokenizer as the file describes it; token ids index the arrays.

    Attributes:
        model: The algorithm: "llama" (SPM), "gpt2" (BPE), "bert", "t5", ...
        pre: The name of the pre-tokenizer; None in old files.
        tokens: The pieces, UTF-8 in every sane file, some possibly empty.
        scores: float32 [tokens], read-only; None if absent.
        token_types: int32 [tokens], read-only, `gguf.TokenType` values; None if absent.
        merges: BPE merges, best first, each two pieces around a space.
        precompiled_charsmap: The normaliser of UGM tokenizers.
        suppress_tokens: Ids that the model must never produce.
        chat_template: The default Jinja template.
        chat_templates: Further templates by name.
    """

    model: str
    pre: str | None
    tokens: Sequence[bytes]
    scores: npt.NDArray[np.float32] | None = None
    token_types: npt.NDArray[np.int32] | None = None
    merges: Sequence[bytes] = ()
    precompiled_charsmap: bytes | None = None
    suppress_tokens: tuple[int, ...] = ()
    token_type_count: int | None = None
    bos_token: int | None = None
    eos_token: int | None = None
    eot_token: int | None = None
    eom_token: int | None = None
    unk_token: int | None = None
    sep_token: int | None = None
    pad_token: int | None = None
    cls_token: int | None = None
    mask_token: int | None = None
    fim_pre_token: int | None = None
    fim_suf_token: int | None = None
    fim_mid_token: int | None = None
    fim_pad_token: int | None = None
    fim_rep_token: int | None = None
    fim_sep_token: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_sep: bool | None = None
    add_space_prefix: bool | None = None
    remove_extra_whitespaces: bool | None = None
    lowercase: bool | None = None
    strip_accents: bool | None = None
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict[str, str])


def read_vocab(metadata: Metadata) -> Vocab:
    """Reads a file's vocabulary.

    Raises:
        ModelFileError: The model or the tokens are missing, arrays disagree in length, an id is
            not in the vocabulary, or a value has another type; names the key.
    """
    tokens = _read_tokens(metadata)
    ids = {name: _read_id(metadata, keys, len(tokens)) for name, keys in _ID_KEYS.items()}
    flags = {
        name: metadata.get_bool(_GGML + key) if _GGML + key in metadata else None
        for name, key in _FLAG_KEYS.items()
    }
    return Vocab(
        model=metadata.get_str(_GGML + "model"),
        pre=_optional_str(metadata, _GGML + "pre"),
        tokens=tokens,
        scores=_read_scores(metadata, len(tokens)),
        token_types=_read_token_types(metadata, len(tokens)),
        merges=metadata.get_strings(_GGML + "merges") if _GGML + "merges" in metadata else (),
        precompiled_charsmap=_read_charsmap(metadata),
        suppress_tokens=_read_suppressed(metadata, len(tokens)),
        token_type_count=_optional_uint(metadata, _GGML + "token_type_count"),
        chat_template=_optional_str(metadata, _TEMPLATE),
        chat_templates=_read_named_templates(metadata),
        **ids,
        **flags,
    )


def _optional_str(metadata: Metadata, key: str) -> str | None:
    return metadata.get_str(key) if key in metadata else None


def _optional_uint(metadata: Metadata, key: str) -> int | None:
    return metadata.get_uint(key) if key in metadata else None


def _read_tokens(metadata: Metadata) -> Strings:
    key = _GGML + "tokens"
    tokens = metadata.get_strings(key)
    if not tokens:
        raise metadata.error(key, "is empty")
    return tokens


def _read_id(metadata: Metadata, keys: tuple[str, ...], num_tokens: int) -> int | None:
    for key in keys:
        if _GGML + key in metadata:
            return metadata.get_uint(_GGML + key, maximum=num_tokens - 1)
    return None


def _per_token(
    metadata: Metadata, key: str, num_tokens: int, kinds: str
) -> npt.NDArray[Any] | None:
    """An array with one number per token, whose numpy kind is one of `kinds`."""
    if key not in metadata:
        return None
    values = metadata.get_array(key)
    if values.dtype.kind not in kinds:
        raise metadata.error(key, f"holds {values.dtype.name}, which is no number of this table")
    if len(values) != num_tokens:
        raise metadata.error(key, f"has {len(values)} elements, the vocabulary {num_tokens}")
    return values


def _read_scores(metadata: Metadata, num_tokens: int) -> npt.NDArray[np.float32] | None:
    key = _GGML + "scores"
    values = _per_token(metadata, key, num_tokens, kinds="fi")
    if values is None:
        return None
    if np.isnan(values).any():
        raise metadata.error(key, f"is NaN for token {int(np.isnan(values).argmax())}")
    scores = values.astype(np.float32)
    scores.flags.writeable = False
    return scores


def _read_token_types(metadata: Metadata, num_tokens: int) -> npt.NDArray[np.int32] | None:
    values = _per_token(metadata, _GGML + "token_type", num_tokens, kinds="iu")
    if values is None:
        return None
    # What no one has defined is "undefined" (0), as in llama.cpp.
    types = np.where((values >= 0) & (values <= 6), values, 0).astype(np.int32)
    types.flags.writeable = False
    return types


def _read_charsmap(metadata: Metadata) -> bytes | None:
    key = _GGML + "precompiled_charsmap"
    if key not in metadata:
        return None
    values = metadata.get_array(key)
    if values.dtype.itemsize != 1 or values.dtype.kind == "b":
        raise metadata.error(key, f"holds {values.dtype.name}, expected bytes")
    return values.tobytes()


def _read_suppressed(metadata: Metadata, num_tokens: int) -> tuple[int, ...]:
    key = _GGML + "suppress_tokens"
    if key not in metadata:
        return ()
    values = metadata.get_array(key)
    if values.dtype.kind not in "iu":
        raise metadata.error(key, f"holds {values.dtype.name}, expected integers")
    token_ids: list[int] = values.tolist()
    for token_id in token_ids:
        if not 0 <= token_id < num_tokens:
            raise metadata.error(key, f"holds {token_id}, allowed are 0 to {num_tokens - 1}")
    return tuple(token_ids)


def _read_named_templates(metadata: Metadata) -> Mapping[str, str]:
    prefix = _TEMPLATE + "."
    return MappingProxyType(
        {
            key.removeprefix(prefix): metadata.get_str(key)
            for key in metadata
            if key.startswith(prefix)
        }
    )

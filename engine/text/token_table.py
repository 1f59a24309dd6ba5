"""The vocabulary as the tokenizer sees it: texts, scores, attributes, special ids, end tokens.

GGUF files leave much of this to convention; the conventions are llama.cpp's and live here alone.
Knows no encoder and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import ModelFileError
from engine.text.token_ids import TokenIds
from engine.text.token_texts import TokenTexts

# Attribute bits. A token usually has one of the first six; `mark_control` adds CONTROL to others.
UNKNOWN = 1
UNUSED = 2
NORMAL = 4
CONTROL = 8
USER_DEFINED = 16
BYTE = 32
LSTRIP = 64
RSTRIP = 128

# Tokens whose text is hidden unless special tokens are rendered, and found only when parsed.
HIDDEN = UNKNOWN | CONTROL

# `tokenizer.ggml.token_type` values (GGUF spec); anything else has no attribute.
_ATTR_OF_TYPE = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}

_EOT_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
)

_DETECTED_TEXTS: Mapping[str, tuple[str, ...]] = {
    "eot": _EOT_TEXTS,
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

_EOG_TEXTS = (
    *_EOT_TEXTS,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)

# Harmony's markers are control tokens in the files, yet output parsers need to see them.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class SpecialIds:
    """Token ids with a role; None where the vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    fim_pre: int | None = None
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None


@dataclass(frozen=True)
class TokenTable:
    """One row per token id. `attributes` holds the bits above; nothing here is ever changed.

    `scores` is float32 [tokens].
    """

    texts: TokenTexts
    ids: TokenIds
    scores: npt.NDArray[np.float32]
    attributes: bytes
    special: SpecialIds
    eog_tokens: frozenset[int]

    def __len__(self) -> int:
        return len(self.texts)

    def tokens_with(self, bits: int) -> list[int]:
        """Returns the ids, rising, that have any of the attribute bits."""
        return [token_id for token_id, attribute in enumerate(self.attributes) if attribute & bits]


def build_token_table(
    tokens: Sequence[bytes],
    *,
    scores: Sequence[float] | npt.NDArray[np.float32] | None,
    types: Sequence[int] | npt.NDArray[np.int32] | None,
    special: SpecialIds,
    strip_right: bool,
    strip_left: str | None,
) -> TokenTable:
    """Resolves what the file says and leaves unsaid into one table.

    `strip_right` makes every special token swallow the white space after it (Phi-3);
    `strip_left` names one token that swallows the white space before it.

    Raises:
        ModelFileError: two tokens have the same text, or an array is too short.

    Source: llama.cpp `llama_vocab::impl::load` (attributes, special ids by text, end tokens).
    """
    _check_length("scores", scores, len(tokens))
    _check_length("token_type", types, len(tokens))
    texts = TokenTexts(tokens)
    ids = TokenIds(texts)
    if len(ids) != len(texts):
        _refuse_duplicate(texts)
    attributes = _attributes(types, len(texts))
    special = _detect_special(special, ids, attributes)
    eog_tokens = _end_tokens(special, ids, texts, attributes)
    if strip_right:
        _mark_strip_right(attributes, ids)
    if strip_left is not None and strip_left in ids:
        attributes[ids[strip_left]] |= LSTRIP
    return TokenTable(
        texts=texts,
        ids=ids,
        scores=np.zeros(len(texts), np.float32)
        if scores is None
        else np.asarray(scores, np.float32)[: len(texts)],
        attributes=bytes(attributes),
        special=special,
        eog_tokens=eog_tokens,
    )


def _check_length(name: str, values: Sized | None, num_tokens: int) -> None:
    if values is not None and len(values) < num_tokens:
        raise ModelFileError(
            f"tokenizer.ggml.{name}", f"{len(values)} entries for {num_tokens} tokens"
        )


def _refuse_duplicate(texts: Iterable[str]) -> None:
    first: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        if first.setdefault(text, token_id) != token_id:
            raise ModelFileError(
                "tokenizer.ggml.tokens",
                f"tokens {first[text]} and {token_id} have the same text {text!r}",
            )


def _attributes(types: Sequence[int] | npt.NDArray[np.int32] | None, num_tokens: int) -> bytearray:
    if types is None:
        return bytearray([NORMAL]) * num_tokens
    kinds = np.asarray(types)[:num_tokens]
    attributes = np.zeros(num_tokens, np.uint8)
    for kind, attribute in _ATTR_OF_TYPE.items():
        attributes[kinds == kind] = attribute
    return bytearray(attributes.tobytes())


def _detect_special(
    special: SpecialIds, ids: Mapping[str, int], attributes: bytearray
) -> SpecialIds:
    """Finds by text the roles that the file does not name, and hides those tokens."""
    found = dict(vars(special))
    for role, texts in _DETECTED_TEXTS.items():
        if found[role] is not None:
            continue
        token_id = next((ids[text] for text in texts if text in ids), None)
        if token_id is not None:
            found[role] = token_id
            attributes[token_id] |= CONTROL
    return SpecialIds(**found)


def _end_tokens(
    special: SpecialIds, ids: Mapping[str, int], texts: TokenTexts, attributes: bytearray
) -> frozenset[int]:
    for token_id, attribute in enumerate(attributes):
        if attribute & CONTROL and "unused" in texts[token_id]:
            attributes[token_id] |= UNUSED
    ends = {special.fim_pad, special.fim_rep, special.fim_sep}
    for text in _EOG_TEXTS:
        if text in ids:
            ends.add(ids[text])
            attributes[ids[text]] |= CONTROL
    for text in _ALWAYS_SHOWN:
        if text in ids:
            attributes[ids[text]] = USER_DEFINED
    ends |= {special.eos, special.eot, special.eom}
    known = {token_id for token_id in ends if token_id is not None}
    _drop_mid_turn_end(known, ids, attributes)
    return frozenset(known)


def _drop_mid_turn_end(ends: set[int], ids: Mapping[str, int], attributes: bytearray) -> None:
    """Takes away the ends that only close a message (`<|end|>`) or mean nothing (`</s>`)."""

    def ends_with(*texts: str) -> bool:
        return any(ids.get(text) in ends for text in texts)

    calls = ends_with("<|call|>", "<|calls|>")
    if calls and ends_with("<|return|>", "<|flush|>") and ends_with("<|end|>"):
        ends.discard(ids["<|end|>"])
        attributes[ids["<|end|>"]] = USER_DEFINED
    if ends_with("<|tool_response>", "<|plamo:eos|>") and ends_with("</s>"):
        ends.discard(ids["</s>"])
        attributes[ids["</s>"]] = NORMAL


def _mark_strip_right(attributes: bytearray, ids: Mapping[str, int]) -> None:
    for token_id, attribute in enumerate(attributes):
        if attribute & (CONTROL | USER_DEFINED | UNKNOWN):
            attributes[token_id] |= RSTRIP
    if "</s>" in ids:
        attributes[ids["</s>"]] |= RSTRIP
    for text in ("<unk>", "<s>", "<|endoftext|>"):
        if text in ids:
            attributes[ids[text]] &= ~RSTRIP

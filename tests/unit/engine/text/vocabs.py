"""Small vocabularies, and slow tokenizers that follow the published algorithms literally."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.gguf.vocab import Vocab

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def make_vocab(
    model: str,
    rows: Sequence[tuple[str, float, int]],
    *,
    merges: Sequence[str] = (),
    pre: str | None = None,
    **others: Any,
) -> Vocab:
    """A vocabulary of (text, score, type) rows; U+DC80 to U+DCFF stand for bytes that are no UTF-8."""
    return Vocab(
        model=model,
        pre=pre,
        tokens=tuple(text.encode("utf-8", "surrogateescape") for text, _, _ in rows),
        scores=np.array([score for _, score, _ in rows], np.float32),
        token_types=np.array([kind for _, _, kind in rows], np.int32),
        merges=tuple(merge.encode("utf-8", "surrogateescape") for merge in merges),
        **others,
    )


def spm_rows(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, float, int]]:
    """`<unk>`, BOS, EOS, the bytes, then the given pieces."""
    special = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    return [
        *special,
        *((text, 0.0, BYTE) for text in BYTE_TOKENS),
        *((text, score, NORMAL) for text, score in pieces),
    ]


def reference_spm(text: str, ids: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """Merges the best-scored neighbours, leftmost first, then spells unknown characters in bytes."""
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        best: tuple[float, int] | None = None
        for position, (left, right) in enumerate(itertools.pairwise(symbols)):
            token_id = ids.get(left + right)
            if token_id is not None and (best is None or scores[token_id] > best[0]):
                best = (scores[token_id], position)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    output: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            output.append(ids[symbol])
        else:
            output.extend(ids[f"<0x{byte:02X}>"] for byte in symbol.encode())
    return output


def reference_bpe(word: str, ids: Mapping[str, int], merges: Sequence[str]) -> list[int]:
    """Applies the merge of the lowest rank, leftmost first; what is no token falls to its bytes."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault((left, right), rank)
    symbols = list(word)
    while True:
        known = [
            (ranks[pair], position)
            for position, pair in enumerate(itertools.pairwise(symbols))
            if pair in ranks
        ]
        if not known:
            break
        _, position = min(known)
        symbols[position : position + 2] = ["".join(symbols[position : position + 2])]
    output: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            output.append(ids[symbol])
        else:
            output.extend(ids[chr(b)] for b in symbol.encode() if b < 128 and chr(b) in ids)
    return output

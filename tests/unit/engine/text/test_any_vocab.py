"""Whatever a file has for tokens and merges, a tokenizer comes of it, or an error that names it.

What reading a vocabulary refuses (none at all, ids that are not in it) does not come here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.gguf.vocab import Vocab
from engine.text.load import load_tokenizer
from tests.unit.engine.text.vocabs import BYTE_TOKENS

_TYPES = st.integers(0, 7)
# Bytes that are no text, text, and what merging and byte fallback look for.
_TEXTS = (
    st.binary(max_size=5)
    | st.text(max_size=3).map(lambda text: text.encode("utf-8", "replace"))
    | st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xc3\xa9", b"[UNK]", b"##a", b" "])
)
_MERGES = st.tuples(_TEXTS, _TEXTS).map(b" ".join) | _TEXTS
_WORDS = ("a b", "ab\u00e9\n\nab", "\U0001f642", "")


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma4", "bert"])
@given(
    rows=st.lists(st.tuples(_TEXTS, _TYPES), min_size=1, max_size=12, unique_by=lambda row: row[0]),
    merges=st.lists(_MERGES, max_size=8),
    has_bytes=st.booleans(),
    special=st.integers(0, 11),
)
def test_any_vocabulary_loads_or_is_refused(
    model: str,
    rows: list[tuple[bytes, int]],
    merges: list[bytes],
    has_bytes: bool,
    special: int,
) -> None:
    texts = {text for text, _ in rows}
    more = [text.encode() for text in BYTE_TOKENS if has_bytes and text.encode() not in texts]
    others: dict[str, Any] = {
        f"{name}_token": special % len(rows) for name in ("bos", "eos", "unk", "sep")
    }
    vocab = Vocab(
        model=model,
        pre="gpt-2",
        tokens=(*(text for text, _ in rows), *more),
        scores=np.linspace(0, -1, len(rows) + len(more), dtype=np.float32),
        token_types=np.array([*(kind for _, kind in rows), *[6] * len(more)], np.int32),
        merges=tuple(merges),
        **others,
    )
    try:
        tokenizer = load_tokenizer(vocab)
    except EngineError:
        return
    for word in _WORDS:
        try:
            ids = tokenizer.encode(word, add_special=True, parse_special=True)
        except EngineError:
            continue
        assert all(0 <= token_id < len(vocab.tokens) for token_id in ids)
        tokenizer.decode(ids, render_special=True)
    tokenizer.decode(list(range(len(vocab.tokens))), render_special=False)

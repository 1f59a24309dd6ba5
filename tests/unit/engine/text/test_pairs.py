"""Where the two texts of a pair lie, against llama-server's own layout."""

from __future__ import annotations

from typing import Any

import pytest

from engine.gguf.vocab import Vocab
from engine.text.load import load_tokenizer
from engine.text.pairs import PairLayout, pair_layout
from tests.unit.engine.text.vocabs import CONTROL, NORMAL, UNKNOWN, make_vocab, spm_rows

_WORDPIECE = [
    ("[PAD]", 0.0, CONTROL),
    ("[UNK]", 0.0, UNKNOWN),
    ("[CLS]", 0.0, CONTROL),
    ("[SEP]", 0.0, CONTROL),
    ("\u2581a", 0.0, NORMAL),
]
_BERT: dict[str, Any] = {"unk_token": 1, "bos_token": 2, "eos_token": 3, "sep_token": 3}


def layout_of(vocab: Vocab) -> PairLayout:
    return pair_layout(vocab, load_tokenizer(vocab))


# As llama-server tokenised pairs of the same vocabularies: one SEP between, and nothing behind.
@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({}, PairLayout((2,), (3,), ())),
        ({"add_eos": True}, PairLayout((2,), (3, 3), (3,))),
        ({"add_sep": False}, PairLayout((2,), (), ())),
        ({"add_bos": False}, PairLayout((), (3,), ())),
    ],
)
def test_wordpiece(flags: dict[str, Any], layout: PairLayout) -> None:
    assert layout_of(make_vocab("bert", _WORDPIECE, **_BERT, **flags)) == layout


def test_sentencepiece_has_what_it_adds_to_texts() -> None:
    assert layout_of(make_vocab("llama", spm_rows([("a", 0.0)]))) == PairLayout((1,))
    vocab = make_vocab("llama", spm_rows([("a", 0.0)]), add_eos=True)
    assert layout_of(vocab) == PairLayout((1,), (2,), (2,))


def test_a_template_has_places_for_both() -> None:
    template = "Query: {query} Document: {document} {other}"
    vocab = make_vocab("bert", _WORDPIECE, **_BERT, chat_templates={"rerank": template})
    layout = layout_of(vocab)
    # What a client sends is never a place itself.
    assert layout.filled("{document}", "x\\1") == "Query: {document} Document: x\\1 {other}"
    assert PairLayout().filled("a", "b") is None

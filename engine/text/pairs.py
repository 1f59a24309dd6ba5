"""A query and a document as one text, the way the model's file says that it scores them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.gguf.vocab import Vocab
from engine.text.tokenizer import Tokenizer, TokenizerKind

_RERANK = "rerank"
_PLACES = re.compile(r"\{(query|document)\}")
# Pre-tokenizers of BERT's relatives, whose texts are told apart by SEP.
_SEPARATING = frozenset({"jina-v1-en", "jina-v2-code", "roberta-bpe"})


@dataclass(frozen=True)
class PairLayout:
    """What lies around the two texts: token ids or, where the file has one, a template."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    template: str | None = None

    def filled(self, query: str, document: str) -> str | None:
        """Returns the template with both texts in their places; None without a template."""
        if self.template is None:
            return None
        texts: Mapping[str, str] = {"query": query, "document": document}
        return _PLACES.sub(lambda place: texts[place[1]], self.template)


def pair_layout(vocab: Vocab, tokenizer: Tokenizer) -> PairLayout:
    """Returns how a file's model wants a query and a document.

    Source: llama-server `format_prompt_rerank`, and `llama_vocab` for which tokens are added.
    """
    if (template := vocab.chat_templates.get(_RERANK)) is not None:
        return PairLayout(template=template)
    is_wordpiece = tokenizer.kind is TokenizerKind.WORDPIECE
    adds_sep = is_wordpiece or vocab.pre in _SEPARATING
    special = tokenizer.special
    end = special.eos if special.eos is not None else special.sep
    # The encoder adds SEP behind every WordPiece text, but that is no EOS.
    ends = _present(end, bool(vocab.add_eos) if is_wordpiece else tokenizer.add_eos)
    seps = _present(special.sep, adds_sep if vocab.add_sep is None else vocab.add_sep)
    begins = _present(special.bos, tokenizer.add_bos and vocab.add_bos is not False)
    return PairLayout(before=begins, between=ends + seps, behind=ends)


def _present(token_id: int | None, is_added: bool) -> tuple[int, ...]:
    return (token_id,) if is_added and token_id is not None else ()

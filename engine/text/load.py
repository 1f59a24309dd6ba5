"""Builds the tokenizer that a GGUF file describes, filling in llama.cpp's defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.errors import UnsupportedModel
from engine.gguf.vocab import Vocab
from engine.text.bpe import BpeEncoder
from engine.text.pieces import build_pieces
from engine.text.pretokenizers import find_pre_tokenizer
from engine.text.spm import SpmEncoder
from engine.text.tidy import keeps_spaces
from engine.text.token_table import SpecialIds, TokenTable, build_token_table
from engine.text.tokenizer import Tokenizer, TokenizerKind
from engine.text.wordpiece import WordPieceEncoder

_SPM_SPECIAL = SpecialIds(bos=1, eos=2, unk=0)
_BPE_SPECIAL = SpecialIds(bos=11, eos=11)
_WORDPIECE_SPECIAL = SpecialIds(bos=101, unk=100, sep=102, pad=0, mask=103)


def load_tokenizer(
    vocab: Vocab,
    *,
    pre_override: str | None = None,
    model_name: str = "",
    architecture: str = "",
) -> Tokenizer:
    """Builds a tokenizer.

    `pre_override` replaces the file's `tokenizer.ggml.pre`. `model_name` (`general.name`) and
    `architecture` decide which special tokens swallow white space, which files do not say.

    Raises:
        UnsupportedModel: the algorithm or pre-tokenizer is unknown, or a token that it needs is
            missing; names the key.
        ModelFileError: the tables contradict themselves.

    Source: llama.cpp `llama_vocab::impl::load`.
    """
    build = _BUILDERS.get(vocab.model)
    if build is None:
        raise UnsupportedModel(
            "tokenizer.ggml.model",
            f"{vocab.model!r} is not one of {', '.join(sorted(_BUILDERS))}",
        )
    vocab = replace(vocab, pre=pre_override or vocab.pre)
    return build(vocab, model_name.lower(), architecture)


def _load_spm(vocab: Vocab, model_name: str, architecture: str) -> Tokenizer:
    table = _table(vocab, _SPM_SPECIAL, model_name, architecture)
    return Tokenizer(
        TokenizerKind.SPM,
        table,
        build_pieces(table, byte_level=False),
        SpmEncoder(table),
        first=_required(table.special.bos, "bos") if vocab.add_bos is not False else None,
        last=_required(table.special.eos, "eos") if vocab.add_eos else None,
        add_space_prefix=vocab.add_space_prefix is not False,
        tidies_spaces=False,
    )


def _load_bpe(vocab: Vocab, model_name: str, architecture: str) -> Tokenizer:
    pre_tokenizer = find_pre_tokenizer("gemma4" if vocab.model == "gemma4" else vocab.pre)
    default = _BPE_SPECIAL
    if vocab.model == "gemma4":
        default = SpecialIds()
    elif not pre_tokenizer.has_default_bos:
        default = replace(default, bos=None)
    table = _table(vocab, default, model_name, architecture)
    # Gemma 4 files deny the BOS token that the model needs.
    adds_bos = pre_tokenizer.adds_bos
    if vocab.add_bos is not None and not pre_tokenizer.newline_words:
        adds_bos = vocab.add_bos
    merges = [merge.decode("utf-8", "surrogateescape") for merge in vocab.merges]
    if not merges and vocab.pre != "kimi-k2":
        raise UnsupportedModel("tokenizer.ggml.merges", "BPE needs merges, the file has none")
    return Tokenizer(
        TokenizerKind.BPE,
        table,
        build_pieces(table, byte_level=not pre_tokenizer.escapes_spaces),
        BpeEncoder(table, merges, pre_tokenizer),
        first=_required(table.special.bos, "bos") if adds_bos else None,
        last=_required(table.special.eos, "eos") if vocab.add_eos else None,
        add_space_prefix=False,
        tidies_spaces=not keeps_spaces(vocab.pre),
    )


def _load_wordpiece(vocab: Vocab, model_name: str, architecture: str) -> Tokenizer:
    table = _table(vocab, _WORDPIECE_SPECIAL, model_name, architecture)
    lowercase = vocab.lowercase is not False
    strip_accents = lowercase if vocab.strip_accents is None else vocab.strip_accents
    return Tokenizer(
        TokenizerKind.WORDPIECE,
        table,
        build_pieces(table, byte_level=False),
        WordPieceEncoder(table, lowercase=lowercase, strip_accents=strip_accents),
        first=_required(table.special.bos, "bos"),
        last=_required(table.special.sep, "seperator"),
        add_space_prefix=False,
        tidies_spaces=True,
    )


_BUILDERS: dict[str, Callable[[Vocab, str, str], Tokenizer]] = {
    "llama": _load_spm,
    "gpt2": _load_bpe,
    "gemma4": _load_bpe,
    "bert": _load_wordpiece,
}


def _required(token_id: int | None, name: str) -> int:
    if token_id is None:
        raise UnsupportedModel(
            f"tokenizer.ggml.{name}_token_id", "this tokenizer adds the token, the file has none"
        )
    return token_id


def _table(vocab: Vocab, default: SpecialIds, model_name: str, architecture: str) -> TokenTable:
    pre = vocab.pre or ""
    strip_left = None
    if any(name in pre for name in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        name in architecture for name in ("nomic-bert-moe", "jina-bert-v3")
    ):
        strip_left = "<mask>"
    elif "modern-bert" in model_name:
        strip_left = "[MASK]"
    strip_right = strip_left is None and ("phi-3" in model_name or "phi3" in model_name)
    return build_token_table(
        vocab.tokens,
        scores=vocab.scores,
        types=vocab.token_types,
        special=_special_ids(vocab, default),
        strip_right=strip_right,
        strip_left=strip_left,
    )


def _special_ids(vocab: Vocab, default: SpecialIds) -> SpecialIds:
    """The file's ids, then the algorithm's defaults where those are in the vocabulary."""
    ids: dict[str, int | None] = {}
    for role, fallback in vars(default).items():
        in_file: int | None = getattr(vocab, f"{role}_token")
        usable = fallback if fallback is not None and fallback < len(vocab.tokens) else None
        ids[role] = usable if in_file is None else in_file
    return SpecialIds(**ids)

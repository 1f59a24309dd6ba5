"""Tiny random encoders with a WordPiece vocabulary, written by the `gguf` package.

The same model gives the same bytes.

Example:
    path = write_encoder(tmp_path / "tiny.gguf", TinyEncoder("bert", has_dense_head=True, num_scores=1))
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.ggufs import encode, write_gguf

WIDTH, NUM_HEADS, HIDDEN, CONTEXT, NUM_LAYERS = 64, 4, 96, 512, 2
BOS, SEP, UNK = 2, 3, 1
_WORDS = ("the", "machine", "learn", "learning", "is", "paris", "city", "of", "a", "big", "small")
WORDPIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(f"\u2581{word}" for word in _WORDS),
    *(f"\u2581{char}" for char in string.ascii_lowercase + string.digits + ".,!?'-"),
    *(char for char in string.ascii_lowercase if char not in "a"),
    *("a", "ing", "er", "est", "s"),
)
# "s" is a letter as well.
VOCAB_TOKENS = tuple(dict.fromkeys(WORDPIECES))
VOCAB = len(VOCAB_TOKENS)


@dataclass(frozen=True)
class TinyEncoder:
    """An encoder. `num_scores` > 0 gives it a head of that many outputs, before which
    `has_dense_head` puts a layer. `rerank` is a template of pairs, `pooling` llama.cpp's number."""

    architecture: Literal["bert", "nomic-bert"] = "bert"
    ggml_type: Type = Type.F32
    has_token_types: bool = True
    has_dense_head: bool = False
    num_scores: int = 0
    rerank: str | None = None
    pooling: int | None = 2
    has_mean_head: bool = False
    seed: int = 0


def write_encoder(path: Path, model: TinyEncoder = TinyEncoder()) -> Path:
    """Writes a model."""
    tensors = {
        name: (encode(values, kind), kind)
        for name, (values, kind) in encoder_tensors(model).items()
    }
    return write_gguf(path, encoder_keys(model), tensors, architecture=model.architecture)


def encoder_keys(model: TinyEncoder) -> dict[str, Any]:
    """All keys of a model's file."""
    own: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": NUM_LAYERS,
        "feed_forward_length": HIDDEN,
        "attention.head_count": NUM_HEADS,
        "attention.layer_norm_epsilon": 1e-12 if model.architecture == "bert" else 1e-5,
        "attention.causal": False,
    }
    if model.pooling is not None:
        own["pooling_type"] = model.pooling
    if model.architecture == "nomic-bert":
        own["rope.freq_base"] = 1000.0
    if model.has_mean_head:
        own["classifier.pooling_type"] = 1
    if model.num_scores > 1:
        own["classifier.output_labels"] = [f"label{i}" for i in range(model.num_scores)]
    found = {f"{model.architecture}.{key}": value for key, value in own.items()} | {
        "general.name": "tiny encoder",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": list(VOCAB_TOKENS),
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (VOCAB - 5),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": SEP,
        "tokenizer.ggml.unknown_token_id": UNK,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.cls_token_id": BOS,
        "tokenizer.ggml.mask_token_id": 4,
    }
    if model.rerank is not None:
        found["tokenizer.chat_template.rerank"] = model.rerank
    return found


def encoder_tensors(
    model: TinyEncoder,
) -> dict[str, tuple[np.ndarray[Any, np.dtype[np.float32]], Type]]:
    """The float weights before quantisation, and the type that each is stored in."""
    rng = np.random.default_rng(model.seed)
    is_bert = model.architecture == "bert"

    def matrix(rows: int, cols: int, std: float | None = None) -> Any:
        values = rng.standard_normal((rows, cols), np.float32)
        return values * np.float32(std or cols**-0.5), model.ggml_type

    def vector(length: int, mean: float = 0.0) -> Any:
        return mean + rng.standard_normal(length, np.float32) / np.float32(10), Type.F32

    def norm(name: str) -> dict[str, Any]:
        return {f"{name}.weight": vector(WIDTH, 1.0), f"{name}.bias": vector(WIDTH)}

    found = {"token_embd.weight": matrix(VOCAB, WIDTH, 1.0)} | norm("token_embd_norm")
    if model.has_token_types:
        found["token_types.weight"] = matrix(2, WIDTH, 1.0)
    if is_bert:
        found["position_embd.weight"] = matrix(CONTEXT, WIDTH, 0.5)
    for layer in range(NUM_LAYERS):
        block = f"blk.{layer}."
        names = ("attn_q", "attn_k", "attn_v", "attn_output") if is_bert else ("attn_output",)
        for name in names:
            found[f"{block}{name}.weight"] = matrix(WIDTH, WIDTH)
            if is_bert:
                found[f"{block}{name}.bias"] = vector(WIDTH)
        if not is_bert:
            found[f"{block}attn_qkv.weight"] = matrix(3 * WIDTH, WIDTH)
            found[f"{block}ffn_gate.weight"] = matrix(HIDDEN, WIDTH)
        found[f"{block}ffn_up.weight"] = matrix(HIDDEN, WIDTH)
        found[f"{block}ffn_down.weight"] = matrix(WIDTH, HIDDEN)
        if is_bert:
            found[f"{block}ffn_up.bias"] = vector(HIDDEN)
            found[f"{block}ffn_down.bias"] = vector(WIDTH)
        found |= norm(f"{block}attn_output_norm") | norm(f"{block}layer_output_norm")
    if model.has_dense_head:
        found |= {"cls.weight": matrix(WIDTH, WIDTH), "cls.bias": vector(WIDTH)}
    if model.num_scores:
        found["cls.output.weight"] = matrix(model.num_scores, WIDTH)
        found["cls.output.bias"] = vector(model.num_scores)
    return found

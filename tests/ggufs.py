"""Tiny GGUF files for tests, written by the `gguf` package, which is not what reads them.

The same arguments give the same bytes. A default model takes some 20 ms to write and 300 kB.

Example:
    path = write_llama(tmp_path / "tiny.gguf", TinyLlama(ggml_type=GGMLQuantizationType.Q8_0))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    GGUFValueType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    quants,
)
from gguf import GGMLQuantizationType as Type

Bytes = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Where a block keeps its float16 factors; blocks of other types have them elsewhere or not at all.
_SCALE_OFFSETS: dict[Type, tuple[int, ...]] = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.IQ1_S: (0,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
# The minimum's factor over the scale's that centres the values of random codes on zero.
_MINIMUM_RATIO = {Type.Q2_K: 1.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}

_WORDS = [
    "the",
    "and",
    "a",
    "to",
    "was",
    "in",
    "he",
    "she",
    "it",
    "of",
    "they",
    "said",
    "day",
    "had",
    "big",
    "little",
    "her",
    "his",
    "so",
    "very",
]


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary as `tokenizer.ggml.*` holds it. Empty scores or merges are left out."""

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    bos: int = 1
    eos: int = 2
    unk: int | None = 0
    add_bos: bool = True
    add_space_prefix: bool = True
    chat_template: str | None = CHATML


@dataclass(frozen=True)
class TinyLlama:
    """A llama with random weights. Matrices are of `ggml_type`, norms always float32.

    Types with blocks of 256 need widths that are multiples of 256. `never_ends` makes the head's
    row of EOS zero, so that greedy decoding runs as long as it may.
    """

    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden: int = 96
    context: int = 512
    rope_base: float = 10000.0
    rope_scale: float | None = None
    has_rope_freqs: bool = False
    tied_head: bool = False
    never_ends: bool = True
    ggml_type: Type = Type.F32
    tokenizer: Literal["spm", "bpe", "tools"] = "spm"
    seed: int = 0


def write_llama(path: Path, model: TinyLlama = TinyLlama(), **writer_options: Any) -> Path:
    """Writes a model; `writer_options` go to GGUFWriter (`split_max_tensors` makes shards)."""
    tokenizer = _TOKENIZERS[model.tokenizer]()
    writer = GGUFWriter(path, "llama", **writer_options)
    add_llama_keys(writer, model)
    add_tokenizer(writer, tokenizer)
    writer.add_vocab_size(len(tokenizer.tokens))
    for name, (values, ggml_type) in llama_tensors(model, tokenizer).items():
        writer.add_tensor(name, encode(values, ggml_type), raw_dtype=ggml_type)
    close(writer)
    return path


def llama_tensors(model: TinyLlama, tokenizer: Tokenizer) -> dict[str, tuple[FloatArray, Type]]:
    """The float weights of a model before quantisation, and the type that each is stored in."""
    rng = np.random.default_rng(model.seed)
    head_dim = model.width // model.num_heads
    kv_width = model.num_kv_heads * head_dim

    def matrix(rows: int, cols: int, std: float | None = None) -> tuple[FloatArray, Type]:
        values = rng.standard_normal((rows, cols), np.float32)
        return values * np.float32(std or cols**-0.5), model.ggml_type

    def norm() -> tuple[FloatArray, Type]:
        return 1 + rng.standard_normal(model.width, np.float32) / np.float32(10), Type.F32

    num_tokens = len(tokenizer.tokens)
    tensors = {"token_embd.weight": matrix(num_tokens, model.width, std=1.0)}
    for layer in range(model.num_layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(model.width, model.width),
            f"blk.{layer}.attn_k.weight": matrix(kv_width, model.width),
            f"blk.{layer}.attn_v.weight": matrix(kv_width, model.width),
            f"blk.{layer}.attn_output.weight": matrix(model.width, model.width),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(model.hidden, model.width),
            f"blk.{layer}.ffn_up.weight": matrix(model.hidden, model.width),
            f"blk.{layer}.ffn_down.weight": matrix(model.width, model.hidden),
        }
    tensors["output_norm.weight"] = norm()
    if model.has_rope_freqs:
        factors = np.linspace(1, 8, head_dim // 2, dtype=np.float32)
        tensors["rope_freqs.weight"] = factors, Type.F32
    if not model.tied_head:
        tensors["output.weight"] = matrix(num_tokens, model.width, std=3 * model.width**-0.5)
    if model.never_ends:
        head = "token_embd.weight" if model.tied_head else "output.weight"
        tensors[head][0][tokenizer.eos] = 0
    return tensors


def add_llama_keys(writer: GGUFWriter, model: TinyLlama) -> None:
    """The hyperparameters, as a converter writes them."""
    writer.add_name("tiny llama")
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.width)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.hidden)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(model.width // model.num_heads)
    writer.add_rope_freq_base(model.rope_base)
    if model.rope_scale is not None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope_scale)


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """The vocabulary's keys."""
    writer.add_tokenizer_model(tokenizer.model)
    if tokenizer.pre is not None:
        writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.scores:
        writer.add_token_scores(tokenizer.scores)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    writer.add_bos_token_id(tokenizer.bos)
    writer.add_eos_token_id(tokenizer.eos)
    if tokenizer.unk is not None:
        writer.add_unk_token_id(tokenizer.unk)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def spm_tokenizer() -> Tokenizer:
    """A SentencePiece vocabulary: specials, 256 bytes, ASCII letters, and merges of a few words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    tokens += ["<|im_start|>", "<|im_end|>"]
    types += [TokenType.CONTROL] * 2
    # Merged pieces must exist before the letters' scores are passed: the best score merges first.
    pieces = _prefixes([f"\u2581{word}" for word in _WORDS])
    letters = ["\u2581", *"etaoinshrdlucmfwygpbvkjxqz", *".,!?'\"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    tokens += pieces + letters
    types += [TokenType.NORMAL] * (len(pieces) + len(letters))
    num_special = len(tokens) - len(pieces) - len(letters)
    scores = [0.0] * num_special + [-float(i) for i in range(len(pieces) + len(letters))]
    return Tokenizer("llama", None, tuple(tokens), tuple(types), scores=tuple(scores))


def tools_tokenizer() -> Tokenizer:
    """The same with a token that opens a call of a tool, the last one."""
    plain = spm_tokenizer()
    return replace(
        plain,
        tokens=(*plain.tokens, "<tool_call>"),
        types=(*plain.types, TokenType.USER_DEFINED),
        scores=(*plain.scores, 0.0),
    )


def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE vocabulary: specials, 256 bytes, and merges of a few words."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    types = [TokenType.CONTROL] * 3
    pieces = _prefixes([f"\u0120{word}" for word in _WORDS])
    merges = tuple(f"{piece[:-1]} {piece[-1]}" for piece in pieces)
    tokens += [*byte_characters().values(), *pieces]
    types += [TokenType.NORMAL] * (256 + len(pieces))
    return Tokenizer(
        "gpt2",
        "gpt-2",
        tuple(tokens),
        tuple(types),
        merges=merges,
        bos=0,
        unk=None,
        add_bos=False,
        add_space_prefix=False,
    )


_TOKENIZERS = {"spm": spm_tokenizer, "bpe": bpe_tokenizer, "tools": tools_tokenizer}


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(shifted)
    }


def _prefixes(words: Sequence[str]) -> list[str]:
    """Every prefix of at least two characters, shortest first: each merges one letter more."""
    found = {word[:end] for word in words for end in range(2, len(word) + 1)}
    return sorted(found, key=lambda piece: (len(piece), piece))


def encode(values: FloatArray, ggml_type: Type) -> npt.NDArray[Any]:
    """Quantises as the `gguf` package does; types that it cannot quantise get random blocks.

    Those have about the spread of `values` and are drawn from a seed that depends on them.
    """
    with np.errstate(all="ignore"):
        try:
            return quants.quantize(values, ggml_type)
        except NotImplementedError:
            seed = np.frombuffer(values.tobytes(), np.uint32)[:8]
            rng = np.random.default_rng(seed)
            return random_blocks(rng, ggml_type, values.shape, float(values.std()))


def random_blocks(
    rng: np.random.Generator, ggml_type: Type, shape: tuple[int, ...], std: float = 1.0
) -> Bytes:
    """Random blocks, uint8 [..., bytes per row], of about standard deviation `std`, all finite.

    Every code and every sub-scale occurs; only factors of float16 are chosen, one per block.
    Float types hold normal values.
    """
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if shape[-1] % block_elements:
        raise ValueError(f"{shape[-1]} columns, {ggml_type.name} has blocks of {block_elements}")
    if block_elements == 1:
        values = rng.standard_normal(shape, np.float32) * np.float32(std)
        return quants.quantize(values, ggml_type).view(np.uint8)
    row_bytes = shape[-1] // block_elements * block_bytes
    raw = rng.integers(0, 256, (*shape[:-1], row_bytes), np.uint8)
    blocks = raw.reshape(-1, block_bytes)
    _set_factors(rng, ggml_type, blocks, 1.0)
    with np.errstate(all="ignore"):
        spread = float(quants.dequantize(blocks, ggml_type).std())
    _set_factors(rng, ggml_type, blocks, std / spread if spread else 1.0)
    return raw


def _set_factors(rng: np.random.Generator, ggml_type: Type, blocks: Bytes, size: float) -> None:
    """Overwrites what could make a block infinite or NaN."""
    if ggml_type is Type.MXFP4:
        blocks[:, 0] = 120 + np.arange(len(blocks)) % 8
    if ggml_type is Type.IQ1_M:
        # The float16 is spread over the top nibbles of four words: keep its exponent small.
        blocks[:, -1] = blocks[:, -1] & 0x0F | 0x20
    factors = (rng.uniform(0.5, 1.5, len(blocks)) * size).astype(np.float16)
    for index, offset in enumerate(_SCALE_OFFSETS.get(ggml_type, ())):
        ratio = _MINIMUM_RATIO.get(ggml_type, 1.0) if index else 1.0
        values = (factors * np.float16(ratio)).astype(np.float16)
        blocks[:, offset : offset + 2] = values.view(np.uint8).reshape(-1, 2)


def write_gguf(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[npt.NDArray[Any], Type]] | None = None,
    *,
    architecture: str = "llama",
    alignment: int | None = None,
    version: int = 3,
    **writer_options: Any,
) -> Path:
    """Writes any file.

    Python ints become uint32 keys, floats float32, arrays of uint32 such; tensors hold raw blocks.
    """
    writer = GGUFWriter(path, architecture, **writer_options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (keys or {}).items():
        _add_key(writer, key, value)
    for name, (values, ggml_type) in (tensors or {}).items():
        writer.add_tensor(name, values, raw_dtype=ggml_type)
    close(writer)
    if version != 3:
        # Version 2 has the same bytes; the package only writes its newest.
        with path.open("r+b") as file:
            file.seek(4)
            file.write(version.to_bytes(4, "little"))
    return path


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case np.ndarray() if value.dtype == np.uint32:
            uint32 = GGUFValueType.UINT32
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=uint32)
        case _:
            writer.add_array(key, value)


def close(writer: GGUFWriter) -> None:
    """Writes everything and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

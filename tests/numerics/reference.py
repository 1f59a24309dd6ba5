"""An independent decoder: numpy in float64, reading files by the `gguf` package's own reader.

It is the definition written down, one whole sequence at a time: no pages, no chunks, no buckets.
Nothing of the engine is imported, so that they can only agree by both being right. Which norms,
biases and fused matrices a block has is what the file holds; the rest of a family is in one table.

Source: Touvron et al. 2023 (LLaMA); Ainslie et al. 2023 (GQA); Su et al. 2021 (RoFormer); Gemma
team 2024, 2025; OLMo team 2024; and the graphs of llama.cpp for what files leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Family:
    """What files leave out. Without a `period` the family has no windows.

    `widest` is the number of layers of the model that scales its scores by width / heads. Window
    layers turn with `local_base` (None: that of the others).
    """

    is_neox: bool = True
    is_gemma: bool = False
    window: int = 0
    period: int = 0
    widest: int = 0
    local_base: float | None = None
    scales_local: bool = True
    enlarges_local: bool = True
    score_cap: float = 0.0
    logit_cap: float = 0.0


_FAMILIES = {
    "llama": _Family(is_neox=False),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "phi3": _Family(),
    "olmo2": _Family(period=4, scales_local=False, enlarges_local=False),
    "gemma2": _Family(
        is_gemma=True, window=4096, period=2, widest=46, score_cap=50.0, logit_cap=30.0
    ),
    "gemma3": _Family(is_gemma=True, period=6, widest=62, local_base=1e4, scales_local=False),
}


class ReferenceDecoder:
    """Weights as float64, each dequantised whole."""

    def __init__(self, path: Path, context_tokens: int = 0) -> None:
        """`context_tokens` chooses between rope factors of a short and a long context."""
        reader: Any = GGUFReader(path)
        keys: dict[str, Any] = {n: field.contents() for n, field in reader.fields.items()}
        architecture = keys["general.architecture"]
        self.key = {name.removeprefix(f"{architecture}."): value for name, value in keys.items()}
        self.tensor: dict[str, Float64] = {
            t.name: quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }
        self._family = _FAMILIES[architecture]
        self._factors = self._rope_factors(context_tokens)

    def logprobs(self, tokens: list[int]) -> Float64:
        """Natural log-probabilities [T, vocab] of what follows each token."""
        x = self.tensor["token_embd.weight"][tokens]
        if self._family.is_gemma:
            x = x * np.sqrt(x.shape[-1])
        for layer in range(self.key["block_count"]):
            block = f"blk.{layer}."
            y = self._attention(layer, self._norm(x, f"{block}attn_norm"))
            x = x + self._norm(y, f"{block}post_attention_norm")
            y = self._ffn(block, self._norm(x, f"{block}ffn_norm"))
            x = x + self._norm(y, f"{block}post_ffw_norm")
        head = "output.weight" if "output.weight" in self.tensor else "token_embd.weight"
        logits = self._norm(x, "output_norm") @ self.tensor[head].T
        logits = logits + self.tensor.get("output.bias", 0.0)
        logits = _capped(logits, self.key.get("final_logit_softcapping", self._family.logit_cap))
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def greedy(self, tokens: list[int], count: int, banned: frozenset[int]) -> list[int]:
        """The `count` most probable tokens that follow, one after another, and are not banned."""
        for _ in range(count):
            following = self.logprobs(tokens)[-1]
            following[list(banned)] = -np.inf
            tokens = [*tokens, int(following.argmax())]
        return tokens[-count:]

    def _norm(self, x: Float64, name: str) -> Float64:
        """RMS norm over as many components as the weight has; none where the file has none."""
        weight = self.tensor.get(f"{name}.weight")
        if weight is None:
            return x
        groups = x.reshape(len(x), -1, len(weight))
        epsilon = self.key["attention.layer_norm_rms_epsilon"]
        scaled = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + epsilon) * weight
        return scaled.reshape(x.shape)

    def _linear(self, x: Float64, name: str) -> Float64:
        return x @ self.tensor[f"{name}.weight"].T + self.tensor.get(f"{name}.bias", 0.0)

    def _ffn(self, block: str, x: Float64) -> Float64:
        up = self._linear(x, f"{block}ffn_up")
        if f"{block}ffn_gate.weight" in self.tensor:
            gate = self._linear(x, f"{block}ffn_gate")
        else:
            gate, up = np.split(up, 2, axis=-1)
        activation = _gelu if self._family.is_gemma else _silu
        return self._linear(activation(gate) * up, f"{block}ffn_down")

    def _projections(self, block: str, x: Float64) -> list[Float64]:
        """Queries, keys and values [T, heads, dim], normalised where the file says so."""
        heads = [self.key["attention.head_count"], *[self.key["attention.head_count_kv"]] * 2]
        if f"{block}attn_qkv.weight" in self.tensor:
            fused = self._linear(x, f"{block}attn_qkv")
            dim = fused.shape[-1] // sum(heads)
            parts = np.split(fused, np.cumsum(heads)[:-1] * dim, axis=-1)
        else:
            parts = [self._linear(x, f"{block}attn_{name}") for name in "qkv"]
        return [
            self._norm(y, f"{block}attn_{name}_norm").reshape(len(x), count, -1)
            for y, name, count in zip(parts, "qkv", heads, strict=True)
        ]

    def _attention(self, layer: int, x: Float64) -> Float64:
        q, k, v = self._projections(f"blk.{layer}.", x)
        group = q.shape[1] // k.shape[1]
        q, k, v = self._rope(q, layer), self._rope(k, layer).repeat(group, 1), v.repeat(group, 1)
        share = q.shape[-1]
        if self.key["block_count"] == self._family.widest:
            share = self.key["embedding_length"] // q.shape[1]
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(share)
        scores = _capped(scores, self.key.get("attn_logit_softcapping", self._family.score_cap))
        age = np.arange(len(x))[:, None] - np.arange(len(x))
        is_visible = (age >= 0) & (age < self._window() if self._slides(layer) else True)
        weights = np.where(is_visible, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1)
        return self._linear(mixed, f"blk.{layer}.attn_output")

    def _window(self) -> int:
        return self.key.get("attention.sliding_window", self._family.window)

    def _slides(self, layer: int) -> bool:
        """Whether a layer sees a window: by the file's list, else all but the last of a period."""
        if not self._family.period or not self._window():
            return False
        pattern = self.key.get("attention.sliding_window_pattern", self._family.period)
        if isinstance(pattern, int):
            return layer % pattern < pattern - 1
        return pattern[layer]

    def _rope_factors(self, context_tokens: int) -> Float64 | float:
        original = self.key.get("rope.scaling.original_context_length", self.key["context_length"])
        by_context = f"rope_factors_{'long' if context_tokens > original else 'short'}.weight"
        return self.tensor.get(by_context, self.tensor.get("rope_freqs.weight", 1.0))

    def _rope(self, x: Float64, layer: int) -> Float64:
        """The first components of each head as complex numbers: neighbours, or halves (neox)."""
        family = self._family
        dims = self.key.get("rope.dimension_count", x.shape[-1])
        base = self.key.get("rope.freq_base", 10000.0)
        scale = 1 / self.key.get("rope.scaling.factor", 1.0)
        size = self.key.get("rope.scaling.attn_factor", 1.0)
        if self._slides(layer):
            base = self.key.get("rope.freq_base_swa", family.local_base or base)
            scale = scale if family.scales_local else 1.0
            size = size if family.enlarges_local else 1.0
        out, half = x.copy(), dims // 2
        exponents: Float64 = -np.arange(half, dtype=np.float64) / half
        frequencies = np.power(base, exponents) / self._factors
        turn = size * np.exp(1j * scale * np.arange(len(x))[:, None, None] * frequencies)
        real, imaginary = slice(0, dims, 2), slice(1, dims, 2)
        if family.is_neox:
            real, imaginary = slice(0, half), slice(half, dims)
        turned = (x[..., real] + 1j * x[..., imaginary]) * turn
        out[..., real], out[..., imaginary] = turned.real, turned.imag
        return out


def _capped(x: Float64, cap: float) -> Float64:
    return cap * np.tanh(x / cap) if cap else x


def _silu(x: Float64) -> Float64:
    return x / (1 + np.exp(-x))


def _gelu(x: Float64) -> Float64:
    """The tanh form."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

"""An independent llama: numpy in float64, reading files by the `gguf` package's own reader.

It is the definition written down, one whole sequence at a time: no pages, no chunks, no buckets.
Nothing of the engine is imported, so that they can only agree by both being right.

Source: Touvron et al. 2023 (LLaMA); Ainslie et al. 2023 (GQA); Su et al. 2021 (RoFormer).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

Float64 = npt.NDArray[np.float64]


class ReferenceLlama:
    """Weights as float64, each dequantised whole."""

    def __init__(self, path: Path) -> None:
        reader: Any = GGUFReader(path)
        self.key: dict[str, Any] = {n: field.contents() for n, field in reader.fields.items()}
        self.tensor: dict[str, Float64] = {
            t.name: quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }

    def logprobs(self, tokens: list[int]) -> Float64:
        """Natural log-probabilities [T, vocab] of what follows each token."""
        x = self.tensor["token_embd.weight"][tokens]
        for layer in range(self.key["llama.block_count"]):
            x = x + self._attention(f"blk.{layer}.", self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + self._ffn(f"blk.{layer}.", self._norm(x, f"blk.{layer}.ffn_norm"))
        head = "output" if "output.weight" in self.tensor else "token_embd"
        logits = self._linear(self._norm(x, "output_norm"), head)
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
        epsilon = self.key["llama.attention.layer_norm_rms_epsilon"]
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return scaled * self.tensor[f"{name}.weight"]

    def _linear(self, x: Float64, name: str) -> Float64:
        return x @ self.tensor[f"{name}.weight"].T + self.tensor.get(f"{name}.bias", 0.0)

    def _ffn(self, block: str, x: Float64) -> Float64:
        gate = self._linear(x, f"{block}ffn_gate")
        gated = gate / (1 + np.exp(-gate)) * self._linear(x, f"{block}ffn_up")
        return self._linear(gated, f"{block}ffn_down")

    def _attention(self, block: str, x: Float64) -> Float64:
        num_heads, num_tokens = self.key["llama.attention.head_count"], len(x)
        q, k, v = (
            self._linear(x, f"{block}attn_{name}").reshape(num_tokens, heads, -1)
            for name, heads in zip("qkv", [num_heads, *[self._kv_heads()] * 2], strict=True)
        )
        k, v = (y.repeat(num_heads // self._kv_heads(), axis=1) for y in (self._rope(k), v))
        scores = np.einsum("thd,shd->hts", self._rope(q), k) / np.sqrt(q.shape[-1])
        scores += np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weights, v).reshape(num_tokens, -1)
        return self._linear(mixed, f"{block}attn_output")

    def _kv_heads(self) -> int:
        return self.key["llama.attention.head_count_kv"]

    def _rope(self, x: Float64) -> Float64:
        """Neighbouring components as complex numbers."""
        half = x.shape[-1] // 2
        exponents: Float64 = -np.arange(half, dtype=np.float64) / half
        frequencies = np.power(self.key["llama.rope.freq_base"], exponents)
        frequencies = frequencies / self.tensor.get("rope_freqs.weight", 1.0)
        positions = np.arange(len(x)) / self.key.get("llama.rope.scaling.factor", 1.0)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(
            1j * positions[:, None, None] * frequencies
        )
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

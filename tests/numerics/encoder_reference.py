"""An independent encoder: numpy in float64, reading files by the `gguf` package's own reader.

One whole text at a time, nothing of the engine imported.

Source: Devlin et al. 2019 (BERT); Nussbaum et al. 2024 (Nomic Embed); the graphs of llama.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

Float64 = npt.NDArray[np.float64]


class ReferenceEncoder:
    """Weights as float64, each dequantised whole."""

    def __init__(self, path: Path) -> None:
        reader: Any = GGUFReader(path)
        keys: dict[str, Any] = {n: field.contents() for n, field in reader.fields.items()}
        self._is_bert = keys["general.architecture"] == "bert"
        prefix = f"{keys['general.architecture']}."
        self.key = {name.removeprefix(prefix): value for name, value in keys.items()}
        self.tensor: dict[str, Float64] = {
            t.name: quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }

    def states(self, tokens: list[int]) -> Float64:
        """The final states of a text's tokens, [T, width]."""
        x = self.tensor["token_embd.weight"][tokens]
        if "token_types.weight" in self.tensor:
            x = x + self.tensor["token_types.weight"][0]
        if self._is_bert:
            x = x + self.tensor["position_embd.weight"][: len(tokens)]
        x = self._norm(x, "token_embd_norm")
        for layer in range(self.key["block_count"]):
            block = f"blk.{layer}."
            x = self._norm(x + self._attention(block, x), f"{block}attn_output_norm")
            x = self._norm(x + self._ffn(block, x), f"{block}layer_output_norm")
        return x

    def scores(self, state: Float64) -> Float64:
        """What the head makes of one state."""
        if "cls.weight" in self.tensor:
            state = np.tanh(self._linear("cls", state))
        return self._linear("cls.output", state) if "cls.output.weight" in self.tensor else state

    def _attention(self, block: str, x: Float64) -> Float64:
        if f"{block}attn_qkv.weight" in self.tensor:
            parts = np.split(self._linear(f"{block}attn_qkv", x), 3, axis=-1)
        else:
            parts = [self._linear(f"{block}attn_{name}", x) for name in "qkv"]
        num_heads = self.key["attention.head_count"]
        queries, keys, values = (
            part.reshape(len(x), num_heads, -1).transpose(1, 0, 2) for part in parts
        )
        if not self._is_bert:
            queries, keys = self._turned(queries), self._turned(keys)
        scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ values
        flat = mixed.transpose(1, 0, 2).reshape(len(x), -1)
        return self._linear(f"{block}attn_output", flat)

    def _turned(self, x: Float64) -> Float64:
        """Rope by halves, [heads, T, dim]."""
        half = x.shape[-1] // 2
        base: float = self.key["rope.freq_base"]
        steps: Float64 = np.arange(half, dtype=np.float64) / half
        places: Float64 = np.arange(x.shape[1], dtype=np.float64)
        theta = places[:, None] * np.power(base, -steps)
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(theta), np.sin(theta)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def _ffn(self, block: str, x: Float64) -> Float64:
        up = self._linear(f"{block}ffn_up", x)
        if self._is_bert:
            inner = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        else:
            gate = self._linear(f"{block}ffn_gate", x)
            inner = gate / (1 + np.exp(-gate)) * up
        return self._linear(f"{block}ffn_down", inner)

    def _linear(self, name: str, x: Float64) -> Float64:
        return x @ self.tensor[f"{name}.weight"].T + self.tensor.get(f"{name}.bias", 0.0)

    def _norm(self, x: Float64, name: str) -> Float64:
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt(
            (centred**2).mean(-1, keepdims=True) + self.key["attention.layer_norm_epsilon"]
        )
        return centred / spread * self.tensor[f"{name}.weight"] + self.tensor[f"{name}.bias"]

"""An independent decoder: numpy in float64, reading files by the `gguf` package's own reader.

It is the definition written down, one whole sequence at a time: no pages, no chunks, no buckets.
Nothing of the engine is imported, so that they can only agree by both being right. Which norms,
biases and fused matrices a block has is what the file holds; the rest of a family is in one table.

Source: Touvron et al. 2023 (LLaMA); Ainslie et al. 2023 (GQA); Su et al. 2021 (RoFormer); Peng et
al. 2023 (YaRN); Gemma team 2024, 2025; OLMo team 2024; OpenAI 2025 (gpt-oss); DeepSeek-AI 2024; and
the graphs of llama.cpp for what files leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, quants

from tests.numerics.experts import Experts, Gating, clamped_swiglu, gelu_gated, silu_gated

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
    gating: Gating = "softmax"
    normalises: bool = False
    is_clamped: bool = False


_FAMILIES = {
    "llama": _Family(is_neox=False, normalises=True),
    "qwen3moe": _Family(normalises=True),
    "olmoe": _Family(),
    "gpt-oss": _Family(period=2, gating="chosen", is_clamped=True),
    "deepseek2": _Family(is_neox=False),
    "falcon-h1": _Family(),
    "granitehybrid": _Family(is_neox=False, normalises=True),
    "lfm2": _Family(),
    "mamba2": _Family(),
    "qwen35": _Family(),
    "qwen3next": _Family(normalises=True),
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
        self._is_latent = "blk.0.attn_kv_a_mqa.weight" in self.tensor
        self._has_pre_norms = "blk.0.attn_norm.weight" in self.tensor
        self._factors = self._rope_factors(context_tokens)

    def logprobs(self, tokens: list[int]) -> Float64:
        """Natural log-probabilities [T, vocab] of what follows each token."""
        head = "output.weight" if "output.weight" in self.tensor else "token_embd.weight"
        logits = self.hidden(tokens) @ self.tensor[head].T
        logits = logits + self.tensor.get("output.bias", 0.0)
        logits = _capped(logits, self.key.get("final_logit_softcapping", self._family.logit_cap))
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def hidden(self, tokens: list[int]) -> Float64:
        """States [T, width] after the last norm."""
        x = self.tensor["token_embd.weight"][tokens]
        if self._family.is_gemma:
            x = x * np.sqrt(x.shape[-1])
        for layer in range(self.key["block_count"]):
            block = f"blk.{layer}."
            attend = self._latent_attention if self._is_latent else self._attention
            y = attend(layer, self._norm(x, f"{block}attn_norm"))
            # gpt-oss gives this name to the norm before the feed-forward.
            is_next = f"{block}ffn_norm.weight" not in self.tensor and self._has_pre_norms
            x = x + (y if is_next else self._norm(y, f"{block}post_attention_norm"))
            y = self._norm(x, f"{block}post_attention_norm" if is_next else f"{block}ffn_norm")
            x = x + self._norm(self._ffn(block, y), f"{block}post_ffw_norm")
        return self._norm(x, "output_norm")

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
        if f"{block}ffn_gate_inp.weight" in self.tensor:
            y = self._experts(block).mix(x)
            has_shared = f"{block}ffn_up_shexp.weight" in self.tensor
            return y + self._dense(block, x, "_shexp") if has_shared else y
        return self._dense(block, x)

    def _dense(self, block: str, x: Float64, suffix: str = "") -> Float64:
        up = self._linear(x, f"{block}ffn_up{suffix}")
        if f"{block}ffn_gate{suffix}.weight" in self.tensor:
            gate = self._linear(x, f"{block}ffn_gate{suffix}")
        else:
            gate, up = np.split(up, 2, axis=-1)
        gated = gelu_gated if self._family.is_gemma else silu_gated
        return self._linear(gated(gate, up), f"{block}ffn_down{suffix}")

    def _experts(self, block: str) -> Experts:
        numbers: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "chosen"}
        family = self._family
        gating = numbers.get(self.key.get("expert_gating_func", 0), family.gating)
        return Experts(
            tensors={
                name.removeprefix(block).removesuffix(".weight"): values
                for name, values in self.tensor.items()
                if name.startswith(block)
            },
            used=self.key["expert_used_count"],
            gating=gating,
            normalises=self.key.get("expert_weights_norm", family.normalises),
            scale=self.key.get("expert_weights_scale", 0.0) or 1.0,
            groups=self.key.get("expert_group_count", 1),
            groups_used=self.key.get("expert_group_used_count", 1),
            gated=clamped_swiglu if family.is_clamped else silu_gated,
        )

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
        sinks = self.tensor.get(f"blk.{layer}.attn_sinks.weight")
        mixed = np.einsum("hts,shd->thd", _softmax(scores, is_visible, sinks), v)
        return self._linear(mixed.reshape(len(x), -1), f"blk.{layer}.attn_output")

    def _latent_attention(self, layer: int, x: Float64) -> Float64:
        """Every head's keys and values are made out of the latent vectors, and attended plainly."""
        block, heads = f"blk.{layer}.", self.key["attention.head_count"]
        rank, dims = self.key["attention.kv_lora_rank"], self.key["rope.dimension_count"]
        if f"{block}attn_q_a.weight" in self.tensor:
            inner = self._norm(self._linear(x, f"{block}attn_q_a"), f"{block}attn_q_a_norm")
            q = self._linear(inner, f"{block}attn_q_b")
        else:
            q = self._linear(x, f"{block}attn_q")
        q = q.reshape(len(x), heads, -1)
        nope = q.shape[-1] - dims
        both = self._linear(x, f"{block}attn_kv_a_mqa")
        latent = self._norm(both[:, :rank], f"{block}attn_kv_a_norm")
        if f"{block}attn_kv_b.weight" in self.tensor:
            made = self._linear(latent, f"{block}attn_kv_b").reshape(len(x), heads, -1)
            own, v = made[..., :nope], made[..., nope:]
        else:
            own = np.einsum("tr,hrn->thn", latent, self.tensor[f"{block}attn_k_b.weight"])
            v = np.einsum("tr,hvr->thv", latent, self.tensor[f"{block}attn_v_b.weight"])
        shared = self._rope(both[:, None, rank:], layer).repeat(heads, 1)
        k = np.concatenate([own, shared], -1)
        q = np.concatenate([q[..., :nope], self._rope(q[..., nope:], layer)], -1)
        scores = np.einsum("thd,shd->hts", q, k) * self._latent_scale(q.shape[-1])
        is_visible = np.tril(np.ones((len(x), len(x)), bool))
        mixed = np.einsum("hts,shd->thd", _softmax(scores, is_visible, None), v)
        return self._linear(mixed.reshape(len(x), -1), f"{block}attn_output")

    def _latent_scale(self, dims: int) -> float:
        """With YaRN, scores grow by the square of what its paper multiplies queries and keys by.

        Files with a log multiplier have it in the scores alone, the others in both.
        """
        if self.key.get("rope.scaling.type") != "yarn":
            return dims**-0.5
        growth = 0.1 * np.log(self.key["rope.scaling.factor"])
        multiplier = 10 * self.key.get("rope.scaling.yarn_log_multiplier", 0.0)
        return float((1 + (multiplier or 1.0) * growth) ** 2 * dims**-0.5)

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
        frequencies = np.power(base, exponents) / self._factors * scale
        if self.key.get("rope.scaling.type") == "yarn" and scale != 1.0:
            frequencies *= self._yarn(dims, base, 1 / scale)
            if not self.key.get("rope.scaling.yarn_log_multiplier"):
                size *= 1 + 0.1 * np.log(1 / scale)
        turn = size * np.exp(1j * np.arange(len(x))[:, None, None] * frequencies)
        real, imaginary = slice(0, dims, 2), slice(1, dims, 2)
        if family.is_neox:
            real, imaginary = slice(0, half), slice(half, dims)
        turned = (x[..., real] + 1j * x[..., imaginary]) * turn
        out[..., real], out[..., imaginary] = turned.real, turned.imag
        return out

    def _yarn(self, dims: int, base: float, factor: float) -> Float64:
        """By how much the frequencies of a context grown by `factor` are raised, [dims // 2].

        Pairs that turn more than 32 times over the original context keep their frequency, those
        that turn less than once have it divided by the factor.
        """
        original = self.key.get("rope.scaling.original_context_length", self.key["context_length"])
        low, high = (
            dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1)
        )
        low, high = max(np.floor(low), 0), min(np.ceil(high), dims - 1)
        kept = 1 - np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        return kept * factor + (1 - kept)


def _softmax(scores: Float64, is_visible: Any, sinks: Float64 | None) -> Float64:
    """Weights [heads, T, S]; a sink per head takes its share and is dropped."""
    most = scores.max(-1, keepdims=True)
    weights = np.where(is_visible, np.exp(scores - most), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return weights / total


def _capped(x: Float64, cap: float) -> Float64:
    return cap * np.tanh(x / cap) if cap else x

"""Mixtures of experts in float64, one token and one expert at a time: the definition.

Source: Shazeer et al. 2017; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1; OpenAI 2025 (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Gating = Literal["softmax", "sigmoid", "chosen"]


@dataclass(frozen=True)
class Experts:
    """A layer's tensors by name, without `.weight`, and how its router chooses."""

    tensors: Mapping[str, Float64]
    used: int
    gating: Gating
    normalises: bool
    scale: float
    groups: int
    groups_used: int
    gated: Callable[[Float64, Float64], Float64]

    def mix(self, x: Float64) -> Float64:
        """The weighted sum of each token's experts."""
        logits = x @ self.tensors["ffn_gate_inp"].T + self.tensors.get("ffn_gate_inp.bias", 0.0)
        y = np.zeros_like(x)
        for token, own in enumerate(logits):
            for expert, weight in self.route(own).items():
                y[token] += weight * self._expert(expert, x[token])
        return y

    def route(self, logits: Float64) -> dict[int, float]:
        """The weights of one token's experts."""
        scores = logits
        if self.gating == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        elif self.gating == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        choice = scores + self.tensors.get("exp_probs_b.bias", 0.0)
        allowed = self._allowed(choice)
        chosen = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: self.used]
        weights = scores[chosen]
        if self.gating == "chosen":
            weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
        if self.normalises:
            weights = weights / max(weights.sum(), 2.0**-14)
        return dict(zip(chosen, (weights * self.scale).tolist(), strict=True))

    def _allowed(self, choice: Float64) -> list[int]:
        """The experts of the groups whose two best sum highest."""
        size = len(choice) // self.groups
        sums = [np.sort(choice[g * size : (g + 1) * size])[-2:].sum() for g in range(self.groups)]
        best = sorted(range(self.groups), key=lambda group: (-sums[group], group))
        used = best[: self.groups_used]
        return [expert for expert in range(len(choice)) if expert // size in used]

    def _expert(self, expert: int, x: Float64) -> Float64:
        if "ffn_gate_up_exps" in self.tensors:
            gate, up = np.split(self._product("ffn_gate_up_exps", expert, x), 2)
        else:
            gate, up = (self._product(f"ffn_{name}_exps", expert, x) for name in ("gate", "up"))
        return self._product("ffn_down_exps", expert, self.gated(gate, up))

    def _product(self, name: str, expert: int, x: Float64) -> Float64:
        y = self.tensors[name][expert] @ x
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias[expert]


def silu_gated(gate: Float64, up: Float64) -> Float64:
    """SwiGLU."""
    return gate / (1 + np.exp(-gate)) * up


def gelu_gated(gate: Float64, up: Float64) -> Float64:
    """GeGLU, in the tanh form."""
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + np.tanh(inner)) * up


def clamped_swiglu(gate: Float64, up: Float64) -> Float64:
    """That of gpt-oss."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

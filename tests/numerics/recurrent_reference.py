"""The recurrent families in numpy and float64, token by token: the recurrences as they are defined.

Source: Dao and Gu 2024 (Mamba 2); Yang et al. 2024 (Gated Delta Networks); Liquid AI 2025 (LFM2);
and the graphs of llama.cpp for what papers leave open.
"""

from __future__ import annotations

import numpy as np

from tests.numerics.reference import Float64, ReferenceDecoder


class RecurrentReference(ReferenceDecoder):
    """As `ReferenceDecoder`, for models with recurrent layers."""

    def logprobs(self, tokens: list[int]) -> Float64:
        """Natural log-probabilities [T, vocab] of what follows each token."""
        x = self.tensor["token_embd.weight"][tokens] * self.key.get("embedding_scale", 1.0)
        residual = self.key.get("residual_scale", 1.0)
        for layer in range(self.key["block_count"] - self.key.get("nextn_predict_layers", 0)):
            block = f"blk.{layer}."
            x = x + residual * self._mix(layer, self._norm(x, f"{block}attn_norm"))
            if (
                f"{block}ffn_down.weight" in self.tensor
                or f"{block}ffn_gate_inp.weight" in self.tensor
            ):
                x = x + residual * self._ffn(block, self._ffn_normed(block, x))
        name = "output_norm" if "output_norm.weight" in self.tensor else "token_embd_norm"
        logits = self._norm(x, name) @ self.tensor["output.weight"].T
        logits = logits / self.key.get("logit_scale", 1.0)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def _ffn_normed(self, block: str, x: Float64) -> Float64:
        if f"{block}ffn_norm" in self.tensor:  # Falcon H1's name has no suffix
            self.tensor[f"{block}ffn_norm.weight"] = self.tensor[f"{block}ffn_norm"]
        after = f"{block}post_attention_norm"
        return self._norm(x, after if f"{after}.weight" in self.tensor else f"{block}ffn_norm")

    def _ffn(self, block: str, x: Float64) -> Float64:
        gate = self.tensor.get(f"{block}ffn_gate_inp_shexp.weight")
        if gate is None:
            return super()._ffn(block, x)
        shared = self._dense(block, x, "_shexp")
        return self._experts(block).mix(x) + shared / (1 + np.exp(-(x @ gate)))[:, None]

    def _mix(self, layer: int, x: Float64) -> Float64:
        block = f"blk.{layer}."
        parts: list[Float64] = []
        if f"{block}attn_q.weight" in self.tensor:
            parts.append(self._gated_attention(block, x))
        if f"{block}ssm_in.weight" in self.tensor:
            parts.append(self._ssm(block, x))
        elif f"{block}shortconv.conv.weight" in self.tensor:
            before, after, values = np.split(self._linear(x, f"{block}shortconv.in_proj"), 3, -1)
            y = after * self._convolved(f"{block}shortconv.conv", before * values)
            parts.append(self._linear(y, f"{block}shortconv.out_proj"))
        elif f"{block}ssm_conv1d.weight" in self.tensor:
            parts.append(self._delta_net(block, x))
        return sum(parts[1:], parts[0])

    def _gated_attention(self, block: str, x: Float64) -> Float64:
        heads, num = self.key["attention.head_count"], len(x)
        q, gate = self._linear(x, f"{block}attn_q").reshape(num, heads, -1), None
        k, v = (self._linear(x, f"{block}attn_{name}") for name in "kv")
        dim = self.key["attention.key_length"]
        if q.shape[-1] == 2 * dim:
            q, gate = q[..., :dim], q[..., dim:].reshape(num, -1)
        q = self._norm(q.reshape(num, -1), f"{block}attn_q_norm").reshape(num, heads, dim)
        k = self._norm(k, f"{block}attn_k_norm").reshape(num, -1, dim)
        if self.key.get("rope.scaling.finetuned", True):
            q, k = self._rope(q, 0), self._rope(k, 0)
        k, v = (part.reshape(num, -1, dim).repeat(heads // k.shape[1], 1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * self.key.get("attention.scale", dim**-0.5)
        scores = np.where(np.tril(np.ones((num, num), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weights, v).reshape(num, -1)
        return self._linear(
            mixed if gate is None else mixed * _sigmoid(gate), f"{block}attn_output"
        )

    def _convolved(self, name: str, x: Float64) -> Float64:
        kernel = self.tensor[f"{name}.weight"]
        taps = kernel.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        windows = np.stack([padded[tap : tap + len(x)] for tap in range(taps)], axis=-1)
        return (windows * kernel).sum(-1) + self.tensor.get(f"{name}.bias", 0.0)

    def _ssm(self, block: str, x: Float64) -> Float64:
        inner, heads = self.key["ssm.inner_size"], self.key["ssm.time_step_rank"]
        groups, size = self.key["ssm.group_count"], self.key["ssm.state_size"]
        fused = self._linear(x, f"{block}ssm_in")
        gate, mixed, steps = np.split(fused, [inner, fused.shape[1] - heads], axis=-1)
        mixed = _silu(self._convolved(f"{block}ssm_conv1d", mixed))
        values, b, c = np.split(mixed, [inner, inner + groups * size], axis=-1)
        values = values.reshape(len(x), heads, -1)
        b, c = (part.reshape(len(x), groups, size).repeat(heads // groups, 1) for part in (b, c))
        steps = np.logaddexp(0, steps + self.tensor[f"{block}ssm_dt.bias"])
        decay = np.exp(steps * self.tensor[f"{block}ssm_a"].reshape(-1))
        state = np.zeros((heads, values.shape[2], size))
        y = np.zeros_like(values)
        for t in range(len(x)):
            new = np.einsum("h,hp,hs->hps", steps[t], values[t], b[t])
            state = decay[t][:, None, None] * state + new
            y[t] = np.einsum("hps,hs->hp", state, c[t])
        y = y + values * self.tensor[f"{block}ssm_d"].reshape(-1, 1)
        y = y.reshape(len(x), groups, -1) * _silu(gate).reshape(len(x), groups, -1)
        epsilon = self.key["attention.layer_norm_rms_epsilon"]
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon)
        y = y * self.tensor[f"{block}ssm_norm.weight"]
        return self._linear(y.reshape(len(x), -1), f"{block}ssm_out")

    def _delta_net(self, block: str, x: Float64) -> Float64:
        heads, key_heads = self.key["ssm.time_step_rank"], self.key["ssm.group_count"]
        dim, num = self.key["ssm.state_size"], len(x)
        mixed = _silu(self._convolved(f"{block}ssm_conv1d", self._linear(x, f"{block}attn_qkv")))
        q, k, v = np.split(mixed, [key_heads * dim, 2 * key_heads * dim], axis=-1)
        q, k, v = (part.reshape(num, -1, dim) for part in (q, k, v))
        epsilon = self.key["attention.layer_norm_rms_epsilon"]
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + epsilon) for part in (q, k))
        if f"{block}ssm_ba.weight" in self.tensor:
            both = self._linear(x, f"{block}ssm_ba").reshape(num, key_heads, 2, -1)
            beta, alpha = (both[:, :, part].reshape(num, heads) for part in (0, 1))
            q, k = (part.repeat(heads // key_heads, 1) for part in (q, k))
        else:
            beta, alpha = (self._linear(x, f"{block}ssm_{name}") for name in ("beta", "alpha"))
            q, k = (np.tile(part, (1, heads // key_heads, 1)) for part in (q, k))
        steps = np.logaddexp(0, alpha + self.tensor[f"{block}ssm_dt.bias"])
        decay = np.exp(steps * self.tensor[f"{block}ssm_a"])
        state = np.zeros((heads, dim, dim))
        y = np.zeros_like(v)
        for t in range(num):
            state = decay[t][:, None, None] * state
            missing = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + np.einsum("h,hk,hv->hkv", _sigmoid(beta[t]), k[t], missing)
            y[t] = np.einsum("hkv,hk->hv", state, q[t]) * dim**-0.5
        y = self._norm(y.reshape(num, -1), f"{block}ssm_norm")
        return self._linear(y * _silu(self._linear(x, f"{block}attn_gate")), f"{block}ssm_out")


def _sigmoid(x: Float64) -> Float64:
    return 1 / (1 + np.exp(-x))


def _silu(x: Float64) -> Float64:
    return x * _sigmoid(x)

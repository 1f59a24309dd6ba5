"""What the recurrent mixers compute and the state that they carry, as plain data.

A recurrent layer keeps a state of fixed size per sequence instead of keys and values per token: the
last inputs of a short causal convolution and, but for `ShortConvSpec`, a matrix per head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateShape:
    """What one layer keeps of a sequence, all float32.

    `conv` is (inputs, channels) of the convolution, `matrix` (heads, rows, cols) or None.
    """

    conv: tuple[int, int]
    matrix: tuple[int, int, int] | None

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state of one layer."""
        inputs, channels = self.conv
        heads, rows, cols = self.matrix or (0, 0, 0)
        return 4 * (inputs * channels + heads * rows * cols)


@dataclass(frozen=True)
class SsmSpec:
    """A Mamba 2 mixer: a state-space model with one scalar decay per head.

    `ssm_in` gives the gate [inner], the convolved inputs x [inner], B and C [groups, state_dim] and
    a time step per head. With dt = softplus(step + bias) and a = exp(dt * A) each head keeps
    `S = a * S + B (dt * x)^T` and gives `S^T C + D * x`. Heads share B and C in groups. `has_norm`: an
    RMS norm over each group's part after the gate.

    Source: Dao and Gu 2024 (Mamba 2).
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int
    has_conv_bias: bool = True
    has_norm: bool = True

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def state(self) -> StateShape:
        """What a layer keeps."""
        matrix = (self.num_heads, self.state_dim, self.head_dim)
        return StateShape((self.kernel - 1, self.channels), matrix)


@dataclass(frozen=True)
class ShortConvSpec:
    """LFM2's mixer: `out(c * conv(b * x))`, where `in_proj` gives b, c and x.

    Source: Liquid AI 2025 (LFM2).
    """

    width: int
    kernel: int

    @property
    def state(self) -> StateShape:
        """What a layer keeps."""
        return StateShape((self.kernel - 1, self.width), None)


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net: linear attention that forgets by a scalar per head.

    Queries, keys and values are convolved together and q and k normalised to length 1. With decay
    a and strength b of a token, each value head keeps `S = a * S`, `S += k (b * (v - S^T k))^T` and
    gives `S^T q / sqrt(head_dim)`, then an RMS norm per head, times silu of a gate.
    `is_interleaved`: value heads that share a key head are neighbours, else they are
    `num_key_heads` apart. `is_fused`: one matrix gives strengths and decays, by key head.

    Source: Yang et al. 2024 (Gated Delta Networks).
    """

    num_key_heads: int
    num_value_heads: int
    head_dim: int
    kernel: int
    is_interleaved: bool = False
    is_fused: bool = False

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> StateShape:
        """What a layer keeps."""
        matrix = (self.num_value_heads, self.head_dim, self.head_dim)
        return StateShape((self.kernel - 1, self.channels), matrix)


RecurrentSpec = SsmSpec | ShortConvSpec | DeltaNetSpec

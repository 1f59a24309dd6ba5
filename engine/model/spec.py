"""What a model computes, as plain data: the only thing that the decoder reads.

An architecture (`engine.model.architectures`) turns a file's metadata into a `ModelSpec`; a new
family is a new builder there, and a new kind of mixer or feed-forward here. Nothing in this module
touches a file or an array.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby


class RopePairing(Enum):
    """Which components rotate together: neighbours (norm) or halves (neox)."""

    NORM = "norm"
    NEOX = "neox"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `dims` components of a head.

    The angle of pair i at position p is `p * position_scale * base**(-2i/dims) / factors[i]`, and
    the rotated part is multiplied by `magnitude`. `factors` names a tensor of the file ("" for
    none); past a context of `short_context` tokens (0: never) `long_factors` takes its place.

    Source: Su et al. 2021 (RoFormer); Ding et al. 2024 (LongRoPE); GGUF `rope.*` keys.
    """

    pairing: RopePairing
    dims: int
    base: float
    position_scale: float = 1.0
    magnitude: float = 1.0
    factors: str = ""
    long_factors: str = ""
    short_context: int = 0


class QkNorm(Enum):
    """RMS norm of queries and keys before rope: none, per head, or over the whole projection."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention; query head h reads K/V head `h // (num_heads // num_kv_heads)`.

    `scale` multiplies the scores, then `soft_cap` c > 0 bounds them as `c * tanh(score / c)`.
    Biases are named by matrix, because files have any subset of them. `is_fused`: one matrix
    `attn_qkv` holds the rows of queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    biases: frozenset[str] = frozenset()
    qk_norm: QkNorm = QkNorm.NONE
    soft_cap: float = 0.0
    is_fused: bool = False


class Activation(Enum):
    """The non-linearity of a gated feed-forward; GELU is the tanh form."""

    SILU = "silu"
    GELU = "gelu"


@dataclass(frozen=True)
class DenseFfnSpec:
    """`down(activation(gate(x)) * up(x))`.

    `is_fused`: `ffn_up` holds the rows of the gate, then those of up.

    Source: Shazeer 2020 (GLU variants).
    """

    hidden: int
    activation: Activation
    biases: frozenset[str] = frozenset()
    is_fused: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """`x += post(mixer(pre(x)))`, then the same with the feed-forward; the norms are RMS norms."""

    mixer: AttentionSpec
    ffn: DenseFfnSpec
    has_pre_norms: bool = True
    has_post_norms: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """A block in its place. `window` None sees all earlier tokens, else the last `window`.

    `rope_id` indexes `ModelSpec.ropes`. Layers that differ only in these two share a program.
    """

    block: BlockSpec
    window: int | None = None
    rope_id: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder-only model.

    `ropes` agree in pairing and dims. `tied_head`: the output projection is the embedding.
    `logit_soft_cap` c > 0 bounds logits as `c * tanh(logit / c)`.
    """

    architecture: str
    vocab_size: int
    width: int
    context_train: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    tied_head: bool
    embedding_scale: float = 1.0
    logit_soft_cap: float = 0.0
    has_head_bias: bool = False

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    @property
    def num_window_layers(self) -> int:
        """Number of sliding-window layers, whose keys and values live in the swa pool."""
        return sum(layer.window is not None for layer in self.layers)

    @property
    def window(self) -> int | None:
        """The widest window of the model; None if every layer sees everything."""
        return max((layer.window for layer in self.layers if layer.window), default=None)

    def runs(self) -> tuple[tuple[BlockSpec, int, int], ...]:
        """Runs of equal blocks as (block, first layer, number): each is one scan of the program."""
        found: list[tuple[BlockSpec, int, int]] = []
        first = 0
        for block, group in groupby(layer.block for layer in self.layers):
            count = sum(1 for _ in group)
            found.append((block, first, count))
            first += count
        return tuple(found)

    def at_context(self, context_tokens: int) -> ModelSpec:
        """The model as it runs with this context: long rope factors past the short context."""
        ropes = tuple(
            replace(rope, factors=rope.long_factors)
            if 0 < rope.short_context < context_tokens
            else rope
            for rope in self.ropes
        )
        return replace(self, ropes=ropes)

"""What a model computes, as plain data: the only thing that the decoder reads.

An architecture (`engine.model.architectures`) turns a file's metadata into a `ModelSpec`; a new
family is a new builder there, and a new kind of mixer or feed-forward here. Nothing in this module
touches a file or an array.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class RopePairing(Enum):
    """Which components rotate together: neighbours (norm) or halves (neox)."""

    NORM = "norm"
    NEOX = "neox"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `dims` components of a head.

    The angle of pair i at position p is `p * position_scale * base**(-2i/dims) / factors[i]`,
    where `factors` is the file's `rope_freqs` when `has_factors`.

    Source: Su et al. 2021 (RoFormer); GGUF `rope.*` keys.
    """

    pairing: RopePairing
    dims: int
    base: float
    position_scale: float
    has_factors: bool


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention; query head h reads K/V head `h // (num_heads // num_kv_heads)`.

    `scale` multiplies the scores. Biases are separate because files have any subset of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    biases: frozenset[str]


class Activation(Enum):
    """The non-linearity of a gated feed-forward."""

    SILU = "silu"


@dataclass(frozen=True)
class DenseFfnSpec:
    """`down(activation(gate(x)) * up(x))`.

    Source: Shazeer 2020 (GLU variants).
    """

    hidden: int
    activation: Activation
    biases: frozenset[str]


@dataclass(frozen=True)
class LayerSpec:
    """One block: RMS norm, mixer, residual, RMS norm, feed-forward, residual."""

    mixer: AttentionSpec
    ffn: DenseFfnSpec


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder-only model. `tied_head`: the output projection is the embedding."""

    architecture: str
    vocab_size: int
    width: int
    context_train: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tied_head: bool

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    def runs(self) -> tuple[tuple[LayerSpec, int, int], ...]:
        """Runs of equal layers as (spec, first layer, number): each is one scan of the program."""
        found: list[tuple[LayerSpec, int, int]] = []
        first = 0
        for layer, group in groupby(self.layers):
            count = sum(1 for _ in group)
            found.append((layer, first, count))
            first += count
        return tuple(found)

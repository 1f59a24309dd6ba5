"""What a model computes, as plain data: the only thing that the decoder reads.

An architecture (`engine.model.architectures`) turns a file's metadata into a `ModelSpec`; a new
family is a new builder there, and a new kind of mixer or feed-forward here. Nothing in this module
touches a file or an array.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from engine.model.cycles import Cycle, find_cycles
from engine.model.encoder_spec import EncoderSpec, ScoringSpec
from engine.model.recurrent_spec import RecurrentSpec, StateShape


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
    With `yarn_ramp` (low, high), pairs up to `low` turn as if `position_scale` were 1, those from
    `high` on with it, and between them the two mix in proportion.

    Source: Su et al. 2021 (RoFormer); Ding et al. 2024 (LongRoPE); Peng et al. 2023 (YaRN); GGUF
    `rope.*` keys.
    """

    pairing: RopePairing
    dims: int
    base: float
    position_scale: float = 1.0
    magnitude: float = 1.0
    factors: str = ""
    long_factors: str = ""
    short_context: int = 0
    yarn_ramp: tuple[float, float] | None = None


@dataclass(frozen=True)
class KvHeads:
    """What attention keeps of a token in a layer: `num` keys and as many values.

    A `value_dim` of 0 means that the values are the first components of the keys.
    """

    num: int
    key_dim: int
    value_dim: int


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
    `attn_qkv` holds the rows of queries, keys and values. `has_sinks`: each head has one more
    score, `attn_sinks`, which takes its share of the weights and has no value. `has_gate`: `attn_q`
    holds each head's query, then a gate whose sigmoid multiplies the head's result.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    biases: frozenset[str] = frozenset()
    qk_norm: QkNorm = QkNorm.NONE
    soft_cap: float = 0.0
    is_fused: bool = False
    has_sinks: bool = False
    has_gate: bool = False
    has_rope: bool = True

    @property
    def kv(self) -> KvHeads:
        """What it keeps of a token."""
        return KvHeads(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def mixed_dim(self) -> int:
        """Components of each head's result."""
        return self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention: keys and values of all heads come from one vector of a token.

    `attn_kv_a_mqa` gives that vector, `latent_dim` long and then normalised, and one key part of
    `rope_dim` components that all heads share. A head's query has `nope_dim` components for its own
    key part, then `rope_dim` rotated ones. `query_rank` > 0: queries pass through a normalised
    vector of that length.

    If `is_absorbed`, `attn_k_b` takes queries to the latent vector and `attn_v_b` takes mixed latent
    vectors to values of `value_dim`, so one vector per token is kept. Else `attn_kv_b` makes keys
    and values of every head, and those are kept.

    Source: DeepSeek-AI 2024 (DeepSeek-V2).
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    query_rank: int = 0
    is_absorbed: bool = True

    @property
    def key_dim(self) -> int:
        """Components of a head's query and, made out of the latent vector, of its key."""
        return self.nope_dim + self.rope_dim

    @property
    def soft_cap(self) -> float:
        """Scores are not bounded."""
        return 0.0

    @property
    def kv(self) -> KvHeads:
        """What it keeps of a token."""
        if self.is_absorbed:
            return KvHeads(1, self.latent_dim + self.rope_dim, 0)
        return KvHeads(self.num_heads, self.key_dim, self.value_dim)

    @property
    def mixed_dim(self) -> int:
        """Components of each head's result, before `attn_v_b`."""
        return self.latent_dim if self.is_absorbed else self.value_dim


Mixer = AttentionSpec | LatentAttentionSpec


class Activation(Enum):
    """The non-linearity of a gated feed-forward; GELU is the tanh form.

    CLAMPED_SWIGLU bounds the gate from above and the other input on both sides, and adds 1 to the
    latter.
    """

    SILU = "silu"
    GELU = "gelu"
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True)
class DenseFfnSpec:
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` unless `is_gated`.

    `is_fused`: `ffn_up` holds the rows of the gate, then those of up.

    Source: Shazeer 2020 (GLU variants).
    """

    hidden: int
    activation: Activation
    biases: frozenset[str] = frozenset()
    is_fused: bool = False
    is_gated: bool = True

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices that are multiplied by the block's input."""
        return ("ffn_up",) if self.is_fused or not self.is_gated else ("ffn_gate", "ffn_up")


class Gating(Enum):
    """How a router's logits become scores: by softmax, each alone, or softmax of the chosen."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    CHOSEN_SOFTMAX = "chosen_softmax"


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a token goes to, and with what weights.

    The best `num_used` scores win, ties by lower number; `has_selection_bias` adds `exp_probs_b` for
    this choice alone. Of several groups of experts only the best `num_groups_used` take part, by
    the sum of their two best. The weights are the scores of the chosen; `normalises` divides them
    by their sum, and then `scale` multiplies them. `has_bias`: the logits have one.

    Source: Shazeer et al. 2017; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.
    """

    num_experts: int
    num_used: int
    gating: Gating
    normalises: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_groups_used: int = 1
    has_bias: bool = False
    has_selection_bias: bool = False


@dataclass(frozen=True)
class MoeFfnSpec:
    """The weighted sum of a few experts, which are dense feed-forwards, and of a shared one.

    `hidden` is an expert's, `biases` names stacks of matrices; `is_fused`: `ffn_gate_up_exps` holds
    the rows of each gate, then those of up. `shared` runs for every token, unweighted or, with `has_shared_gate`, times the
    sigmoid of its input's product with the vector `ffn_gate_inp_shexp`.
    """

    router: RouterSpec
    hidden: int
    activation: Activation
    biases: frozenset[str] = frozenset()
    is_fused: bool = False
    shared: DenseFfnSpec | None = None
    has_shared_gate: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stacks that are multiplied by the block's input."""
        return ("ffn_gate_up_exps",) if self.is_fused else ("ffn_gate_exps", "ffn_up_exps")


Ffn = DenseFfnSpec | MoeFfnSpec


@dataclass(frozen=True)
class BlockSpec:
    """`x += post(mixer(pre(x)))`, then the same with the feed-forward; the norms are RMS norms.

    `has_sum_norms`, of encoders: in place of those, `x = norm(x + mixer(x))` and the same with the
    feed-forward, and the norms are layer norms.

    The mixer is attention, a recurrence or, side by side and added, both. `residual_scale`
    multiplies what is added to x; `ffn_norm` is what the file calls the norm before the
    feed-forward.
    """

    mixer: Mixer | None
    ffn: Ffn | None
    has_pre_norms: bool = True
    has_post_norms: bool = False
    has_sum_norms: bool = False
    ffn_norm: str = "ffn_norm.weight"
    recurrent: RecurrentSpec | None = None
    residual_scale: float = 1.0


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
    """A whole model: a decoder or, with `encoder`, one that only reads.

    `ropes` agree in pairing and dims. `tied_head`: the output projection is the embedding.
    `logit_scale` multiplies logits, then `logit_soft_cap` c > 0 bounds them as
    `c * tanh(logit / c)`. `num_unused_layers` blocks follow the others in the file and predict
    tokens further ahead: they are not run. `scoring` is a head of its own beside the others. What an
    encoder has of a text is gone after the step that read it, so it keeps nothing in any pool.
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
    logit_scale: float = 1.0
    output_norm: str = "output_norm.weight"
    num_unused_layers: int = 0
    encoder: EncoderSpec | None = None
    scoring: ScoringSpec | None = None

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    @property
    def num_full_layers(self) -> int:
        """Number of layers that attend to everything; their keys and values live in the kv pool."""
        return sum(mixer is not None and window is None for mixer, window in self._keepers())

    @property
    def num_window_layers(self) -> int:
        """Number of sliding-window layers, whose keys and values live in the swa pool."""
        return sum(layer.window is not None for layer in self.layers)

    @property
    def num_recurrent_layers(self) -> int:
        """Number of layers with a recurrence, whose state lives in the mamba pool."""
        return sum(layer.block.recurrent is not None for layer in self.layers)

    @property
    def has_attention(self) -> bool:
        """Whether any layer keeps keys and values."""
        return any(mixer is not None for mixer, _ in self._keepers())

    @property
    def kv(self) -> KvHeads:
        """What a token keeps per attention layer, the same in all of them; nothing without any."""
        kept = (mixer.kv for mixer, _ in self._keepers() if mixer is not None)
        return next(kept, KvHeads(0, 0, 0))

    def _keepers(self) -> list[tuple[Mixer | None, int | None]]:
        """Mixer and window of each layer that may keep keys and values; no layer of an encoder."""
        layers = () if self.encoder else self.layers
        return [(layer.block.mixer, layer.window) for layer in layers]

    @property
    def state(self) -> StateShape | None:
        """What a recurrent layer keeps of a sequence, the same in all; None where there is none."""
        recurrent = (layer.block.recurrent for layer in self.layers)
        return next((spec.state for spec in recurrent if spec is not None), None)

    @property
    def window(self) -> int | None:
        """The widest window of the model; None if every layer sees everything."""
        return max((layer.window for layer in self.layers if layer.window), default=None)

    def cycles(self) -> tuple[Cycle, ...]:
        """How the program walks the layers; layers of equal blocks are one run."""
        return find_cycles([layer.block for layer in self.layers])

    def runs(self) -> tuple[tuple[BlockSpec, tuple[int, ...]], ...]:
        """Every run of all cycles, as its block and its layers."""
        runs = (run for cycle in self.cycles() for run in cycle.runs)
        return tuple((self.layers[run[0]].block, run) for run in runs)

    def at_context(self, context_tokens: int) -> ModelSpec:
        """The model as it runs with this context: long rope factors past the short context."""
        ropes = tuple(
            replace(rope, factors=rope.long_factors)
            if 0 < rope.short_context < context_tokens
            else rope
            for rope in self.ropes
        )
        return replace(self, ropes=ropes)

"""Which tensors the recurrent mixers have, by name and shape: pure arithmetic on their specs.

Shapes have the outermost dimension first. Matrices are named without `.weight`; small tensors that
no product takes, whatever their dimensions, are named as in the file.
"""

from __future__ import annotations

from engine.model.recurrent_spec import DeltaNetSpec, RecurrentSpec, ShortConvSpec, SsmSpec


def recurrent_matrices(spec: RecurrentSpec, width: int) -> dict[str, tuple[int, int]]:
    """The matrices of a mixer: name to (rows, cols)."""
    if isinstance(spec, SsmSpec):
        rows = spec.inner + spec.channels + spec.num_heads
        return {"ssm_in": (rows, width), "ssm_out": (width, spec.inner)}
    if isinstance(spec, ShortConvSpec):
        return {"shortconv.in_proj": (3 * width, width), "shortconv.out_proj": (width, width)}
    heads = spec.num_value_heads
    found = {"attn_qkv": (spec.channels, width), "attn_gate": (spec.value_width, width)}
    if spec.is_fused:
        found["ssm_ba"] = (2 * heads, width)
    else:
        found |= {"ssm_beta": (heads, width), "ssm_alpha": (heads, width)}
    return found | {"ssm_out": (width, spec.value_width)}


def recurrent_arrays(spec: RecurrentSpec) -> dict[str, tuple[int, ...]]:
    """The small tensors of a mixer: file name to shape."""
    if isinstance(spec, ShortConvSpec):
        return {"shortconv.conv.weight": (spec.width, spec.kernel)}
    found: dict[str, tuple[int, ...]] = {"ssm_conv1d.weight": (spec.channels, spec.kernel)}
    if isinstance(spec, DeltaNetSpec):
        heads = (spec.num_value_heads,)
        return found | {"ssm_dt.bias": heads, "ssm_a": heads, "ssm_norm.weight": (spec.head_dim,)}
    found |= {
        "ssm_dt.bias": (spec.num_heads,),
        "ssm_a": (spec.num_heads, 1),
        "ssm_d": (spec.num_heads, 1),
    }
    if spec.has_conv_bias:
        found["ssm_conv1d.bias"] = (spec.channels,)
    if spec.has_norm:
        found["ssm_norm.weight"] = (spec.num_groups, spec.inner // spec.num_groups)
    return found

"""The recurrent mixers by their specs."""

from __future__ import annotations

import jax

from engine.model import delta_net, short_conv, ssm
from engine.model.context import Context
from engine.model.place import Place
from engine.model.recurrent_spec import RecurrentSpec, ShortConvSpec, SsmSpec
from engine.model.states import StatePool
from engine.model.weights import LayerArrays


def mix_recurrent(
    context: Context,
    spec: RecurrentSpec,
    own: LayerArrays,
    place: Place,
    x: jax.Array,
    pool: StatePool,
) -> tuple[jax.Array, StatePool]:
    """What a layer's mixer makes of f32 [N, width], and the states after it."""
    if isinstance(spec, SsmSpec):
        return ssm.mix(context, spec, own, place, x, pool)
    if isinstance(spec, ShortConvSpec):
        return short_conv.mix(context, own, place, x, pool)
    return delta_net.mix(context, spec, own, place, x, pool)

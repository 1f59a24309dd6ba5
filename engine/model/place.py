"""Where each layer's keys and values lie in the pool array, and how it looks at them.

The kv and the swa pool have sizes, page ids and tables of their own; their units share one array,
so that layers of both kinds can be scanned by one program. Pure integers but for the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from engine.model.spec import ModelSpec

FULL, WINDOW, NEITHER = 0, 1, 2
_UNLIMITED = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Place:
    """Int32 [L] each, or scalars for one layer.

    `kind` is FULL, WINDOW or, without attention, NEITHER; `first_unit` is the layer's sink, `window`
    how many tokens a query sees. `first_state` is the layer's sink in the arrays of states, 0 for
    layers without a recurrence.
    """

    kind: jax.Array
    first_unit: jax.Array
    window: jax.Array
    rope_id: jax.Array
    first_state: jax.Array

    def part(self, layers: Sequence[int]) -> Place:
        """The entries of some layers."""
        own = np.array(layers, np.int32)
        return Place(
            self.kind[own],
            self.first_unit[own],
            self.window[own],
            self.rope_id[own],
            self.first_state[own],
        )


def num_units(spec: ModelSpec, num_pages: int, num_window_pages: int) -> int:
    """Units of the array of keys: per layer its pages and a sink."""
    full, window = spec.num_full_layers, spec.num_window_layers
    return full * (num_pages + 1) + window * (num_window_pages + 1)


def num_state_units(spec: ModelSpec, num_states: int) -> int:
    """Units of the arrays of states: per recurrent layer its states and a sink."""
    return spec.num_recurrent_layers * (num_states + 1)


def place_layers(
    spec: ModelSpec, num_pages: int, num_window_pages: int, num_states: int = 0
) -> Place:
    """Lays all full layers out first, then all window layers, and states in arrays of their own.

    Pages and states are usable ones; each layer has a sink more.
    """
    next_full, next_state = 0, 0
    next_window = spec.num_full_layers * (num_pages + 1)
    rows: list[tuple[int, int, int, int, int]] = []
    for layer in spec.layers:
        first_state = 0
        if layer.block.recurrent is not None:
            first_state = next_state
            next_state += num_states + 1
        if layer.block.mixer is None or spec.encoder:
            rows.append((NEITHER, 0, _UNLIMITED, layer.rope_id, first_state))
        elif layer.window is None:
            rows.append((FULL, next_full, _UNLIMITED, layer.rope_id, first_state))
            next_full += num_pages + 1
        else:
            rows.append((WINDOW, next_window, layer.window, layer.rope_id, first_state))
            next_window += num_window_pages + 1
    columns = np.array(rows, np.int32).T
    return Place(*jax.device_put([*columns], may_alias=False))

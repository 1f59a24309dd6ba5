"""Where each layer's keys and values lie in the pool array, and how it looks at them.

The kv and the swa pool have sizes, page ids and tables of their own; their units share one array,
so that layers of both kinds can be scanned by one program. Pure integers but for the last step.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.model.spec import ModelSpec

FULL, WINDOW = 0, 1
_UNLIMITED = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Place:
    """Int32 [L] each, or scalars for one layer.

    `kind` is FULL or WINDOW, `first_unit` the layer's sink, `window` how many tokens a query sees.
    """

    kind: jax.Array
    first_unit: jax.Array
    window: jax.Array
    rope_id: jax.Array

    def part(self, first: int, count: int) -> Place:
        """The entries of a run of layers."""
        own = slice(first, first + count)
        return Place(self.kind[own], self.first_unit[own], self.window[own], self.rope_id[own])


def num_units(spec: ModelSpec, num_pages: int, num_window_pages: int) -> int:
    """Units of the pool array: per layer its pages and a sink."""
    num_window_layers = spec.num_window_layers
    num_full_layers = spec.num_layers - num_window_layers
    return num_full_layers * (num_pages + 1) + num_window_layers * (num_window_pages + 1)


def place_layers(spec: ModelSpec, num_pages: int, num_window_pages: int) -> Place:
    """Lays all full layers out first, then all window layers; pages are usable ones."""
    next_full = 0
    next_window = (spec.num_layers - spec.num_window_layers) * (num_pages + 1)
    rows: list[tuple[int, int, int, int]] = []
    for layer in spec.layers:
        if layer.window is None:
            rows.append((FULL, next_full, _UNLIMITED, layer.rope_id))
            next_full += num_pages + 1
        else:
            rows.append((WINDOW, next_window, layer.window, layer.rope_id))
            next_window += num_window_pages + 1
    columns = np.array(rows, np.int32).T
    kind, first_unit, window, rope_id = (jnp.asarray(column) for column in columns)
    return Place(kind, first_unit, window, rope_id)

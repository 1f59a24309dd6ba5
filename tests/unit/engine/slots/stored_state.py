"""The state in the files of `stored/`: one was written by each version of the schema.

Its numbers come from a formula, so that what must be read from an old file is known for ever.
"""

from __future__ import annotations

import numpy as np

from engine.slots.fingerprint import Traits
from engine.slots.manifest import AdapterMark, Manifest
from engine.slots.state_layout import (
    LayerGroup,
    Mark,
    RecurrentLayout,
    StateLayout,
    content_of,
)
from tests.unit.engine.slots.saved import FINGERPRINT, State

_NUM_TOKENS = 21
_WINDOW = StateLayout(LayerGroup(1, 1, 2, 1, 4), LayerGroup(1, 1, 2, 1, 2), 8, "f16")
_RECURRENT = StateLayout(
    LayerGroup(1, 1, 2, 1, 4), None, 0, "f16", RecurrentLayout(2, (2, 3), (1, 2, 2))
)
_ADAPTERS = (AdapterMark("ab" * 32, 0.5),)


def stored_state(version: int) -> State:
    """What the file of a version holds; the first one knew no recurrent layers."""
    layout, marks = (
        (_WINDOW, (Mark(3, 12), Mark(19, 21)))
        if version == 1
        else (_RECURRENT, (Mark(12, 12), Mark(20, 20), Mark(21, 21)))
    )
    manifest = Manifest(
        fingerprint=FINGERPRINT,
        traits=Traits(layout, rope="norm 4 base 10000.0", tokenizer="aa", sampled="bb"),
        adapters=_ADAPTERS,
        model_name="Stored",
        tenant="0a",
        num_tokens=_NUM_TOKENS,
        marks=marks,
        moved_from=17 if version == 1 else None,
        digests={},
    )
    contents = {
        piece: content_of(
            piece,
            [
                (np.arange(t.nbytes // t.dtype.itemsize) % 251 - 125 - index)
                .astype(t.dtype)
                .reshape(t.shape)
                for index, t in enumerate(piece.tensors(layout))
            ],
        )
        for piece in manifest.pieces
    }
    return State(manifest, [(7 * i) % 300 for i in range(_NUM_TOKENS)], contents)

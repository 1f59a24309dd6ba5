"""Small saved states for the tests of slot files: random keys and values, written for real."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.requests import AdapterScale
from engine.slots.fingerprint import Traits
from engine.slots.folder import SlotFolder
from engine.slots.manifest import AdapterMark, Manifest
from engine.slots.reader import Acceptance, open_slot
from engine.slots.state_layout import (
    Content,
    LayerGroup,
    Mark,
    Piece,
    RecurrentLayout,
    StateLayout,
    content_of,
)
from engine.slots.writer import SlotWriter

VOCAB = 300
LAYOUT = StateLayout(
    full=LayerGroup(2, 2, 4, 2, 4),
    window=LayerGroup(1, 2, 4, 2, 4),
    window_tokens=24,
    kv_type="f16",
)
RECURRENT = StateLayout(
    LayerGroup(1, 2, 4, 2, 4), None, 0, "f16", RecurrentLayout(3, (3, 5), (2, 4, 3))
)
TRAITS = Traits(LAYOUT, rope="norm 4 base 10000.0", tokenizer="aa", sampled="bb")
FINGERPRINT = "cc"
NAME = "one.slot"


def no_scales(adapters: tuple[AdapterMark, ...]) -> tuple[AdapterScale, ...] | None:
    return None if adapters else ()


ACCEPTED = Acceptance(
    traits=TRAITS,
    vocab_size=VOCAB,
    context_tokens=1024,
    tenant=None,
    scales_of=no_scales,
    adapters="none",
)


@dataclass(frozen=True)
class State:
    """Tokens and what lies in the pieces of their manifest."""

    manifest: Manifest
    tokens: list[int]
    contents: dict[Piece, Content]

    def write(self, folder: SlotFolder, filename: str = NAME) -> int:
        with SlotWriter.open(folder, filename, self.manifest, self.tokens) as writer:
            for piece in self.manifest.pieces:
                writer.add(piece, self.contents[piece])
            return writer.publish()


def make_state(
    num_tokens: int = 300, layout: StateLayout = LAYOUT, seed: int = 0, **changes: Any
) -> State:
    """A state that can be continued at its end, and with a window at up to 17 tokens before it."""
    rng = np.random.default_rng(seed)
    marks = (Mark(num_tokens if layout.recurrent else max(1, num_tokens - 17), num_tokens),)
    manifest = Manifest(
        fingerprint=FINGERPRINT,
        traits=replace(TRAITS, layout=layout),
        adapters=(),
        model_name="Tiny",
        tenant="",
        num_tokens=num_tokens,
        marks=marks if layout.has_marks and num_tokens else (),
        moved_from=None,
        digests={},
    )
    manifest = replace(manifest, **changes)
    contents = {
        piece: content_of(
            piece,
            [rng.standard_normal(t.shape).astype(t.dtype) for t in piece.tensors(layout)],
        )
        for piece in manifest.pieces
    }
    return State(manifest, rng.integers(0, VOCAB, num_tokens).tolist(), contents)


def read_state(
    folder: SlotFolder, filename: str = NAME, accepted: Acceptance = ACCEPTED
) -> tuple[tuple[int, ...], dict[Piece, Content]]:
    """Opens, verifies and reads all of a file."""
    with open_slot(folder, filename) as unverified:
        verified = unverified.verify(accepted, FINGERPRINT)
        return verified.tokens, {piece: verified.read(piece) for piece in verified.pieces}


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file of a tree with its content, links and FIFOs by name only."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }

"""Files that earlier versions wrote: they are read, or refused by their version, for ever.

To store one of a new version, write `stored_state` of it with that version's own code.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.requests import AdapterScale
from engine.slots.errors import SlotFileMismatch
from engine.slots.folder import SlotFolder
from engine.slots.manifest import SCHEMA_VERSION, AdapterMark
from engine.slots.reader import open_slot
from engine.slots.state_layout import arrays_of
from tests.unit.engine.slots.saved import ACCEPTED, FINGERPRINT, NAME
from tests.unit.engine.slots.stored_state import stored_state

_STORED = Path(__file__).parent / "stored"
_VERSIONS = [1, 2]


def _any_scales(marks: tuple[AdapterMark, ...]) -> tuple[AdapterScale, ...]:
    return tuple(AdapterScale(index, mark.scale) for index, mark in enumerate(marks))


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(str(tmp_path))


def test_every_version_has_its_file() -> None:
    assert {path.name for path in _STORED.iterdir()} == {
        f"version-{version}.slot" for version in (*_VERSIONS, 3)
    }
    assert str(_VERSIONS[-1]) == SCHEMA_VERSION


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_file_of_every_version_is_read(folder: SlotFolder, version: int) -> None:
    shutil.copy(_STORED / f"version-{version}.slot", Path(folder.root, NAME))
    state = stored_state(version)
    accepted = replace(ACCEPTED, traits=state.manifest.traits, scales_of=_any_scales)
    with open_slot(folder, NAME) as unverified:
        slot = unverified.verify(accepted, FINGERPRINT)
        assert (unverified.model_name, slot.tenant) == ("Stored", "0a")
        assert list(slot.tokens) == state.tokens
        assert slot.marks == state.manifest.marks
        assert slot.moved_from == state.manifest.moved_from
        assert slot.scales == (AdapterScale(0, 0.5),)
        assert slot.pieces == state.manifest.pieces
        for piece in slot.pieces:
            pairs = zip(arrays_of(slot.read(piece)), arrays_of(state.contents[piece]), strict=True)
            assert all(np.array_equal(read, written) for read, written in pairs)


def test_what_is_written_now_is_the_stored_file(folder: SlotFolder) -> None:
    """The same state gives the same bytes: a change of them would be another version."""
    stored_state(_VERSIONS[-1]).write(folder)
    expected = (_STORED / f"version-{SCHEMA_VERSION}.slot").read_bytes()
    assert Path(folder.root, NAME).read_bytes() == expected


def test_a_file_of_a_later_version_is_refused_by_it(folder: SlotFolder) -> None:
    shutil.copy(_STORED / "version-3.slot", Path(folder.root, NAME))
    with pytest.raises(SlotFileMismatch) as caught, open_slot(folder, NAME):
        pass
    found = caught.value
    assert (found.field, found.expected, found.found) == ("version", "1 or 2", "3")

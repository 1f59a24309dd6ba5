"""A file that a save replaces is freed behind the answer, and before the next file is begun."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from engine.slots.errors import SlotIo
from engine.slots.file_work import Gathered, SaveOrder, save
from engine.slots.folder import SlotFolder
from engine.slots.state_layout import Content, Piece
from tests.unit.engine.slots.saved import FINGERPRINT, NAME, TRAITS, make_state, read_state

_OLD, _NEW = make_state(40, seed=1), make_state(300, seed=2)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux opens a file without reading or waiting"
)


@dataclass(frozen=True)
class _Ready:
    content: Content

    def wait(self) -> Content:
        return self.content


@dataclass
class _WatchedLock:
    """A lock that notes what is in the folder whenever it is taken and let go."""

    root: Path
    steps: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    inner: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self) -> None:
        assert self.inner.acquire(timeout=30)
        self._note("taken")

    def release(self) -> None:
        self._note("let go")
        self.inner.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _note(self, step: str) -> None:
        temporaries = [name for name in os.listdir(self.root) if name.startswith(".saving-")]
        self.steps.append((step, len(temporaries), _num_deleted(self.root)))


def _held(root: Path) -> list[str]:
    """Files of the folder that this process holds open."""
    targets: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread closed it meanwhile
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return [target for target in targets if target.startswith(f"{root}/")]


def _num_deleted(root: Path) -> int:
    """How many of them have no name any more."""
    return sum(target.endswith(" (deleted)") for target in _held(root))


def _gather(piece: Piece) -> Future[Gathered]:
    done: Future[Gathered] = Future()
    done.set_result(_Ready(_NEW.contents[piece]))
    return done


def test_a_save_is_told_before_the_file_that_it_replaced_is_freed(
    root: Path, folder: SlotFolder
) -> None:
    _OLD.write(folder)
    told: list[tuple[int, int]] = []
    order = SaveOrder(folder, NAME, FINGERPRINT, TRAITS, "Tiny")

    def tell(size: int) -> None:
        assert read_state(folder)[0] == tuple(_NEW.tokens)
        told.append((size, _num_deleted(root)))

    save(order, _NEW.manifest, _NEW.tokens, _gather, lambda: False, tell)
    assert told == [((root / NAME).stat().st_size, 1)]
    assert _num_deleted(root) == 0
    assert not folder.freeing.locked()


def test_the_next_file_is_begun_once_the_replaced_one_is_freed(root: Path) -> None:
    lock = _WatchedLock(root)
    folder = SlotFolder(str(root), freeing=cast("Any", lock))
    _OLD.write(folder)
    assert lock.steps == [("taken", 0, 0), ("let go", 0, 0)]  # there was none to replace
    lock.steps.clear()
    _NEW.write(folder)
    assert lock.steps == [
        ("taken", 0, 0),  # no file is begun while another is being freed
        ("let go", 0, 0),
        ("taken", 1, 0),
        ("let go", 0, 0),
    ]


def test_a_save_that_fails_lets_go_of_the_old_file(
    root: Path, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _OLD.write(folder)
    with monkeypatch.context() as patch:
        patch.setattr("engine.slots.folder.os.rename", _no_rename)
        with pytest.raises(SlotIo):
            _NEW.write(folder)
    assert not folder.freeing.locked()
    assert read_state(folder)[0] == tuple(_OLD.tokens)
    assert not _held(root)


def _no_rename(*_: object, **__: object) -> None:
    raise OSError(5, "no")

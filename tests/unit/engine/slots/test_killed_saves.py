"""Death in the middle of a save: the old file or the new one, never a third thing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.slots.folder import SlotFolder
from tests.unit.engine.slots.saved import NAME, files_in, make_state, read_state

_OLD, _NEW = make_state(40, seed=1), make_state(300, seed=2)


_KILLER = """
import os, signal, sys
from tests.unit.engine.slots.saved import make_state
from tests.unit.engine.slots.faulty_os import FaultyOs
from engine.slots import folder, writer

class Deadly(FaultyOs):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        if name not in ("open", "pwrite", "fsync", "rename"):
            return getattr(os, name)
        def call(*args, **kwargs):
            if len(self.calls) == self.at:
                if name == "pwrite":
                    os.pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*args, **kwargs)
        return call

assert "jax" not in sys.modules
deadly = Deadly(0, int(sys.argv[2]), for_ever=False)
folder.os = writer.os = deadly
make_state(300, seed=2).write(folder.SlotFolder(sys.argv[1]))
"""


def test_a_kill_at_every_stage_leaves_the_old_file_or_the_new(root: Path, folder: SlotFolder):
    _OLD.write(folder)
    old = (root / NAME).read_bytes()
    _NEW.write(folder, "new")
    new = (root / "new").read_bytes()
    os.unlink(root / "new")
    outcomes: list[bytes] = []
    for at in range(100):
        done = subprocess.run([sys.executable, "-c", _KILLER, str(root), str(at)], check=False)
        outcomes.append((root / NAME).read_bytes())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        folder.sweep()
        assert set(files_in(root)) == {NAME}
    assert len(outcomes) > 8
    switch = outcomes.index(new)
    assert outcomes == [old] * switch + [new] * (len(outcomes) - switch)
    # Killed before the rename it is old, behind it new, and read_state takes it.
    assert len(outcomes) - switch == 2
    assert read_state(folder)[0] == tuple(_NEW.tokens)

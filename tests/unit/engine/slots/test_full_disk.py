"""Saves on a disk that is really full: a small tmpfs in a mount namespace of its own (check 4)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys
from engine.slots.errors import DiskFull
from engine.slots.folder import SlotFolder
from dataclasses import replace
from tests.unit.engine.slots.saved import ACCEPTED, make_state, read_state

root, most = sys.argv[1], int(sys.argv[2])
folder, accepted = SlotFolder(root), replace(ACCEPTED, context_tokens=10**6)
kept, num_full = {}, 0
for turn in range(20):
    for slot in range(4):
        name = f"slot-{slot}"
        state = make_state(1 + (turn * 37 + slot * 11) * most // 800, seed=turn * 4 + slot)
        before = {n: open(os.path.join(root, n), "rb").read() for n in os.listdir(root)}
        try:
            state.write(folder, name)
            kept[name] = tuple(state.tokens)
        except DiskFull as error:
            assert error.filename == name
            num_full += 1
            after = {n: open(os.path.join(root, n), "rb").read() for n in os.listdir(root)}
            assert after == before, "an old file changed, or a temporary one stayed"
        for each, tokens in kept.items():
            assert read_state(folder, each, accepted)[0] == tokens
assert 0 < num_full < 80, num_full
# What is deleted is room again, without a restart.
for name in list(kept):
    folder.delete(name)
state.write(folder, "again")
assert read_state(folder, "again", accepted)[0] == tuple(state.tokens)
print("full", num_full)
"""


@pytest.mark.parametrize(("size", "most_tokens"), [("64k", 500), ("1m", 9000)])
def test_a_full_disk_keeps_old_files_and_gets_its_room_back(
    tmp_path: Path, size: str, most_tokens: int
) -> None:
    mount = f"mount -t tmpfs -o size={size} tmpfs {tmp_path}"
    namespace = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*namespace, mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = f'{mount} && exec "$@"'
    program = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(most_tokens)]
    done = subprocess.run(
        [*namespace, command, "sh", *program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("full ")

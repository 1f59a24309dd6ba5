"""A state far larger than what may be held of it: saved and restored piece by piece."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# 8 layers of 8 heads of 64 keys and values: 16 KiB a token.
_SCRIPT = """
import resource, sys
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from engine.slots.file_work import RestoreOrder, SaveOrder, restore, save
from engine.slots.folder import SlotFolder
from engine.slots.state_layout import LayerGroup, StateLayout, content_of
from tests.unit.engine.slots.saved import ACCEPTED, FINGERPRINT, NAME, TRAITS, make_state

num_tokens = int(sys.argv[2])
layout = StateLayout(LayerGroup(8, 8, 64, 8, 64), None, 0, "f16")
traits = replace(TRAITS, layout=layout)
manifest = replace(make_state(1, layout).manifest, num_tokens=num_tokens)
tokens = [7] * num_tokens
folder = SlotFolder(sys.argv[1])

def arrays(piece):
    number = piece.span.start % 1999
    return [np.full(t.shape, number + i, t.dtype) for i, t in enumerate(piece.tensors(layout))]

@dataclass
class Gathered:
    piece: object
    def wait(self):
        return content_of(self.piece, arrays(self.piece))

def done(value):
    future = Future()
    future.set_result(value)
    return future

class Target:
    num_filled = 0
    def reserve(self, slot, *, may_evict):
        return done(True)
    def fill(self, piece, content):
        keys, values = arrays(piece)
        assert np.array_equal(content.keys, keys) and np.array_equal(content.values, values)
        self.num_filled += 1
        return done(None)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()
order = SaveOrder(folder, NAME, FINGERPRINT, traits, "Tiny")
sizes = []
save(order, manifest, tokens, lambda p: done(Gathered(p)), lambda: False, sizes.append)
(size,) = sizes
saved = peak() - before
accepted = replace(ACCEPTED, traits=traits, context_tokens=num_tokens)
target = Target()
restore(RestoreOrder(folder, NAME, FINGERPRINT, accepted), target, lambda: False)
assert target.num_filled == len(manifest.pieces)
print(size, saved, peak() - before)
"""
_MB = 1 << 20


@pytest.mark.parametrize("num_mb", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_save_of_a_gigabyte_needs_no_second_one(tmp_path: Path, num_mb: int) -> None:
    """Of the state no more than a few pieces of 4 MB are in memory, however large it is."""
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(num_mb * 64)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size_bytes, saved, restored = map(int, done.stdout.split())
    assert size_bytes >= num_mb * _MB
    assert saved <= 64 * _MB
    assert restored <= 64 * _MB

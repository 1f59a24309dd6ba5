"""Programs of other sizes, which are made and dropped as often as pools change."""

from __future__ import annotations

import gc
from pathlib import Path

from engine.step import DeviceSizes
from tests.ggufs import TinyLlama, write_llama
from tests.native import requires_native
from tests.runners import open_runner


@requires_native  # which compile faster; what is kept does not depend on it
def test_programs_that_are_dropped_leave_no_object_behind(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", TinyLlama())
    runner = open_runner(path, max_chunk=16, num_pages=12, is_native=True)
    counts: list[int] = []
    for num_pages in (20, 21, 22, 23):
        runner.prepare(DeviceSizes(kv=num_pages))
        gc.collect()
        counts.append(len(gc.get_objects()))
    # A program's own tracing leaves a hundred and more.
    assert counts[-1] - counts[1] < 50

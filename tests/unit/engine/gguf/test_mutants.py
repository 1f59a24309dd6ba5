"""Whatever is wrong with a file, it is a typed error, and finding out costs little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.gguf.mutants import PEAK_BYTES, fields, kind_of, load, run, write_seeds

NUM_MUTANTS = 500


def test_seeds_are_sound(tmp_path: Path) -> None:
    seeds = write_seeds(tmp_path)
    assert len(seeds) >= 5
    for name in seeds:
        load(tmp_path / name)


def test_the_map_of_fields_ends_where_the_tensors_begin(tmp_path: Path) -> None:
    for data in write_seeds(tmp_path).values():
        last = fields(data)[-1]
        head_end = last.start + last.width
        # The last field is an offset, followed by zero padding and then by tensor data.
        assert not any(data[head_end : -(-head_end // 32) * 32])


@pytest.mark.timeout(120)
def test_mutants_load_or_are_refused_by_a_typed_error(tmp_path: Path) -> None:
    outcomes = list(run(NUM_MUTANTS, tmp_path))
    assert max(outcome.peak_bytes for outcome in outcomes) <= PEAK_BYTES
    kinds = {kind_of(outcome.error) for outcome in outcomes}
    # The generator must get past the first checks, and reach most of them.
    assert "" in kinds, "none loaded"
    assert len(kinds) >= 25, sorted(kinds)

"""Whatever is wrong with an adapter, it is a typed error, and finding out costs little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.adapters.source import read_adapter
from tests.unit.engine.adapters.mutants import MAX_RANK, MODEL, load, run, write_seeds
from tests.unit.engine.gguf.mutants import PEAK_BYTES, kind_of

NUM_MUTANTS = 450


def test_seeds_are_sound(tmp_path: Path) -> None:
    names = write_seeds(tmp_path)
    paths = {
        tmp_path / name if name.endswith(".gguf") else (tmp_path / name).parent for name in names
    }
    assert len(paths) == 7
    for path in paths:
        load(path)


@pytest.mark.timeout(120)
def test_mutants_load_or_are_refused_by_a_typed_error(tmp_path: Path) -> None:
    outcomes = list(run(NUM_MUTANTS, tmp_path))
    assert max(outcome.peak_bytes for outcome in outcomes) <= PEAK_BYTES
    by_form = {"gguf": set[str](), "json": set[str](), "safetensors": set[str]()}
    for outcome in outcomes:
        by_form[outcome.name.rpartition(".")[2]].add(kind_of(outcome.error))
    for form, least in (("gguf", 25), ("json", 10), ("safetensors", 12)):
        kinds = by_form[form]
        assert "" in kinds, f"no {form} loaded"
        assert len(kinds) >= least, sorted(kinds)


def test_what_is_loaded_twice_is_the_same(tmp_path: Path) -> None:
    """A digest that depends on anything else would keep prefixes from being found again."""
    for name in write_seeds(tmp_path):
        path = tmp_path / name
        path = path if path.suffix == ".gguf" else path.parent
        first, second = (read_adapter(path, MODEL, MAX_RANK).facts for _ in range(2))
        assert first == second

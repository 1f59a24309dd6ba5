from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from engine.compile_cache import machine_key, processor_features
from tests.ggufs import TinyLlama, write_llama

ROOT = Path(__file__).parents[3]

# What a process that loads a model did: programs read from the cache, and programs compiled.
LOAD = """
import json, sys
import jax
from engine.loading import load_engine
from engine.types import EngineConfig

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
config = EngineConfig(256, num_slots=1, chunk_tokens=16, compile_cache=sys.argv[2])
load_engine(sys.argv[1], config, sink=print)
count = lambda name: events.count("/jax/compilation_cache/cache_" + name)
print(json.dumps({"hits": count("hits"), "misses": count("misses")}))
"""


def load_in_a_new_process(model: Path, cache: Path) -> dict[str, int]:
    """Hits and misses of the cache."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), str(cache)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_compiles_nothing_and_the_folder_is_private(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", TinyLlama(num_layers=1))
    cache = tmp_path / "deep" / "xla"
    first = load_in_a_new_process(model, cache)
    (own,) = cache.iterdir()
    files = {path.name for path in own.iterdir()}
    second = load_in_a_new_process(model, cache)
    assert first["misses"] > 0
    assert second["misses"] == 0
    assert second["hits"] >= first["misses"]
    assert {path.name for path in own.iterdir()} == files
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert own.name.startswith("jax-")


def test_the_folder_differs_by_version_machine_and_processor() -> None:
    names = {
        machine_key(("0.10.2", "0.10.2"), "x86_64", "avx2"),
        machine_key(("0.10.3", "0.10.2"), "x86_64", "avx2"),
        machine_key(("0.10.2", "0.10.3"), "x86_64", "avx2"),
        machine_key(("0.10.2", "0.10.2"), "aarch64", "avx2"),
        machine_key(("0.10.2", "0.10.2"), "x86_64", "avx2 avx512f"),
    }
    assert len(names) == 5
    assert machine_key(("1", "2"), "x86_64", "a") == machine_key(("1", "2"), "x86_64", "a")
    assert all("/" not in name for name in names)


X86 = """processor\t: 0
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse {extra}
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu sse {extra}
"""


def test_flags_make_the_processor_and_its_clock_does_not() -> None:
    plain = processor_features(X86.format(mhz="2400.000", extra="avx2"))
    assert plain == processor_features(X86.format(mhz="3100.123", extra="avx2"))
    assert plain != processor_features(X86.format(mhz="2400.000", extra="avx2 avx512f"))
    assert "avx2" in plain


def test_arm_calls_them_features_and_kinds_of_cores_all_count() -> None:
    big, little = "Features\t: fp asimd sve\n", "Features\t: fp asimd\n"
    assert processor_features(big + little) == processor_features(little + big)
    assert processor_features(big + little) != processor_features(big)
    assert processor_features("vendor : x\n") == ""

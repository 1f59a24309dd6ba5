"""llama.cpp, as far as it is here: the Python binding, and the programs that were named."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.bench.servers import library_path


class PeerError(RuntimeError):
    """A program of the peer's failed, or is not where it was said to be."""


@dataclass(frozen=True)
class Peer:
    """Which parts of llama.cpp can be measured; None for a program that was not named."""

    has_binding: bool
    bench: Path | None
    server: Path | None
    quantize: Path | None

    def missing(self) -> list[str]:
        """What is not there, each with what that leaves out."""
        lacks: list[str] = []
        if not self.has_binding:
            lacks.append("llama-cpp-python is not installed (pip install -e '.[bench]')")
        if self.server is None:
            lacks.append("no llama-server was named (--llama-server): nothing served by the peer")
        if self.bench is None and not self.has_binding:
            lacks.append("no llama-bench was named either: no engine figures of the peer")
        return lacks

    def bench_rates(self, model: Path, *, prompt: int, steps: int, threads: int) -> list[float]:
        """llama-bench's tokens per second of one prompt and of one decode.

        Raises:
            PeerError: It failed.
        """
        assert self.bench is not None
        command = [str(self.bench), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
        rows = json.loads(_run([*command, "-p", str(prompt), "-n", str(steps)]))
        return [statistics.median(row["samples_ts"]) for row in rows]


def find_peer(bench: Path | None, server: Path | None, quantize: Path | None) -> Peer:
    """What is named must be there; the binding may be.

    Raises:
        PeerError: A named program is not an executable file.
    """
    for program in (bench, server, quantize):
        if program is not None and shutil.which(program) is None:
            raise PeerError(f"{program} is not a program that can be run")
    has_binding = importlib.util.find_spec("llama_cpp") is not None
    return Peer(has_binding, bench, server, quantize)


def run_quantize(program: Path, source: Path, target: Path, quantisation: str) -> None:
    """Runs llama-quantize.

    Raises:
        PeerError: It failed.
    """
    _run([str(program), "--allow-requantize", str(source), str(target), quantisation])


def _run(command: list[str]) -> str:
    environment = {**os.environ, **library_path(Path(command[0]))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:]
        raise PeerError(f"{command[0]} ended with status {done.returncode}: {' '.join(tail)}")
    return done.stdout

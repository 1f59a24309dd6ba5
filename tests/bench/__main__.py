"""`python -m tests.bench`: start-up, memory and speed of the real server, as one table.

Times are wall-clock medians on whatever else the machine does; compare ratios, not machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from service.command_line import service_command_line
from service.fetch import ProgressLine, resolve_model
from tests.bench.load import decode_rate, prefill_rate
from tests.bench.server import Server


def main() -> int:
    """Runs everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2)")
    parser.add_argument("--kernels", default="auto", help="native or xla (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of each figure")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    figures = measure(arguments.model or default_model(), arguments.kernels, arguments.runs)
    width = max(len(name) for name in figures)
    for name, value in figures.items():
        print(f"{name:{width}}  {value:10.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def default_model() -> Path:
    """SmolLM2, fetched if it is not there."""
    options = service_command_line([], os.environ)
    progress = ProgressLine(sys.stderr)
    return resolve_model(
        options.model, say=lambda line: print(line, file=sys.stderr), progress=progress
    )


def measure(model: Path, kernels: str, runs: int) -> dict[str, float]:
    """All figures of one model by name."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        cold: list[float] = []
        for run in range(runs):
            with Server(model, compile_cache=f"{cache}/{run}", kernels=kernels) as server:
                cold.append(server.ready_s)
        figures["ready, empty compile cache (s)"] = statistics.median(cold)
        warm: list[float] = []
        for _ in range(runs):
            with Server(model, compile_cache=f"{cache}/0", kernels=kernels) as server:
                warm.append(server.ready_s)
        figures["ready, warm compile cache (s)"] = statistics.median(warm)
        with Server(model, compile_cache=f"{cache}/0", kernels=kernels) as server:
            for streams in (1, 8):
                rates = [decode_rate(server, streams) for _ in range(runs)]
                figures[f"decode, {streams} streams (tokens/s)"] = statistics.median(rates)
            rates = [prefill_rate(server) for _ in range(runs)]
            figures["prefill, 512 tokens (tokens/s)"] = statistics.median(rates)
            figures["peak resident memory, service (MB)"] = server.peak_bytes() / 1e6
            figures["kv pool (MB)"] = server.pool_bytes() / 1e6
    figures["model file (MB)"] = model.stat().st_size / 1e6
    return figures


if __name__ == "__main__":
    sys.exit(main())

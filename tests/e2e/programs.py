"""Kvarts programs as processes of a test: started on free ports, read, and always ended.

Every process that a program starts inherits its output. The end of that output therefore proves
that nothing of it is left, whoever started it and however it ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The console scripts lie beside the interpreter.
SCRIPTS = Path(sys.executable).parent
# Hang guards, not expectations: a cold compile on a busy machine takes its time.
READY_S = 240.0
END_S = 30.0

_HTTP = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
_GRPC = re.compile(r"listening on (?:.*, )?(127\.0\.0\.1:\d+)$")
_METRICS = re.compile(r" I metrics on (127\.0\.0\.1:\d+)$")
_READY = re.compile(r" I ready$")
# Settings of whoever runs the tests are none of the program's.
_FOREIGN = ("LLAMA_", "KVARTS_", "HF_", "HUGGINGFACE_")


class Output:
    """The lines of a process, read by a thread as they come so that the process never waits."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process
        self._changed = threading.Condition()
        self._has_ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """Returns the first line that matches; fails if the output ends before."""
        found: list[re.Match[str]] = []
        seen = 0

        def search() -> bool:
            nonlocal seen
            while seen < len(self.lines) and not found:
                match = pattern.search(self.lines[seen])
                found.extend([match] if match else [])
                seen += 1
            return bool(found) or self._has_ended

        with self._changed:
            self._changed.wait_for(search, timeout_s)
        assert found, f"no line matches {pattern.pattern!r}:\n{self.text()}"
        return found[0]

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns when no process holds the output any more."""
        self._thread.join(timeout_s)
        assert self._has_ended, f"a process still runs:\n{self.text()}"

    def text(self) -> str:
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


@dataclass(frozen=True)
class Program:
    """A running program."""

    process: subprocess.Popen[str]
    output: Output

    def ready(self) -> Program:
        """Waits until the model can generate."""
        self.output.wait_for(_READY, READY_S)
        return self

    def http_url(self) -> str:
        """Waits until the gateway listens; returns its URL."""
        return self.output.wait_for(_HTTP, READY_S)[1]

    def grpc_address(self) -> str:
        """Waits until the public gRPC door is open; returns `host:port`."""
        return self.output.wait_for(_GRPC, READY_S)[1]

    def metrics_url(self) -> str:
        """Waits until the metrics have a port; returns their URL."""
        return f"http://{self.output.wait_for(_METRICS, READY_S)[1]}"

    def exit_status(self) -> int:
        """Waits for the end of the program and of all that it started."""
        status = self.process.wait(END_S)
        self.output.wait_for_end(END_S)
        return status


@contextlib.contextmanager
def running(
    name: str,
    *flags: str,
    environ: Sequence[tuple[str, str]] = (),
    cwd: str | None = None,
) -> Generator[Program]:
    """Runs `name` with `flags`; leaving ends it, whatever state it is in."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    process = subprocess.Popen(
        [str(SCRIPTS / name), *flags],
        cwd=cwd,
        env={**inherited, "XDG_CONFIG_HOME": os.devnull, **dict(environ)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    program = Program(process, Output(process))
    try:
        yield program
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        program.output.wait_for_end(END_S)
        assert process.stdout is not None
        process.stdout.close()

"""A server of its own for one measurement, ours or the peer's, on free ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_READY_LIMIT_S = 300.0


class Server:
    """Started at construction; `ready_s` is the time to the first 200 of /health."""

    def __init__(
        self, command: Sequence[str], *, port: int, environment: Mapping[str, str]
    ) -> None:
        """Starts it and waits until it is ready.

        Raises:
            RuntimeError: It ended or did not become ready.
        """
        self.port = port
        started_s = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        try:
            self._await_ready(started_s)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started_s

    def _await_ready(self, started_s: float) -> None:
        while time.monotonic() - started_s < _READY_LIMIT_S:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
        raise RuntimeError(f"not ready after {_READY_LIMIT_S} s")

    def get(self, path: str, *, port: int | None = None) -> bytes:
        """The body of a GET, from the HTTP door unless another port is named."""
        url = f"http://127.0.0.1:{port or self.port}{path}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.read()

    def peak_bytes(self) -> int:
        """The most resident memory of the process so far (Linux)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class OwnServer(Server):
    """kvarts-server, both doors open; the service is the process whose memory counts."""

    def __init__(
        self,
        model: Path,
        *,
        threads: int,
        kernels: str,
        compile_cache: str,
        context_tokens: int,
        slots: int = 8,
        more: Sequence[str] = (),
    ) -> None:
        """As `Server`; `more` arguments follow the others."""
        port, grpc_port, self._metrics_port = _free_port(), _free_port(), _free_port()
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        command = [sys.executable, "-m", "service.launcher", "-m", str(model)]
        command += ["--port", str(port), "--grpc-port", str(grpc_port), "--log-disable"]
        command += ["-c", str(context_tokens), "-np", str(slots), "-kvu", "-t", str(threads)]
        command += ["--compile-cache", compile_cache, "--kernels", kernels]
        command += ["--metrics-port", str(self._metrics_port), *more]
        super().__init__(command, port=port, environment={})

    def metric(self, name: str) -> float:
        """The sum of all samples of a metric."""
        lines = self.get("/metrics", port=self._metrics_port).decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name
        )


class PeerServer(Server):
    """llama-server with the same sizes."""

    def __init__(
        self,
        program: Path,
        model: Path,
        *,
        threads: int,
        context_tokens: int,
        slots: int = 8,
        more: Sequence[str] = (),
    ) -> None:
        """As `Server`; `more` arguments follow the others."""
        port = _free_port()
        command = [str(program), "-m", str(model), "--port", str(port), "-t", str(threads)]
        command += ["-c", str(context_tokens), "-np", str(slots), "-kvu", "--no-webui", *more]
        super().__init__(command, port=port, environment=library_path(program))


def library_path(program: Path) -> dict[str, str]:
    """Lets a program that was built in place find the libraries beside it."""
    paths = [str(program.resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

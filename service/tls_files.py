"""The PEM files of a TLS server, and whether one could use them. Knows no gRPC."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


class BadCertificates(Exception):
    """Files that no TLS server can use; the message names file and cause."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a server; with `client_ca_file` clients must show a certificate."""

    cert_file: str
    key_file: str
    client_ca_file: str | None

    @property
    def all(self) -> tuple[str, ...]:
        """The files that there are."""
        return tuple(filter(None, (self.cert_file, self.key_file, self.client_ca_file)))


def check_certificates(files: TlsFiles) -> None:
    """Reads a chain, its key and the authorities as a TLS server would.

    Raises:
        BadCertificates: A file cannot be read, is no PEM, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = f"{files.cert_file} with key {files.key_file}"
    try:
        # Without a password the library would ask the terminal for one.
        context.load_cert_chain(files.cert_file, files.key_file, password="")
    except (OSError, ValueError) as error:
        raise BadCertificates(f"{pair}: {_cause(error)}") from error
    if files.client_ca_file is None:
        return
    try:
        context.load_verify_locations(files.client_ca_file)
    except (OSError, ValueError) as error:
        raise BadCertificates(f"{files.client_ca_file}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "is no PEM").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

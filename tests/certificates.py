"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from service.tls_files import TlsFiles

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="makes certificates with openssl")


class Certificates:
    """An authority in a folder, and what it signs."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._ca_key = folder / f"{name}.key"
        subject = ("-subj", f"/CN={name}", "-days", "1")
        self._openssl("req", "-x509", *self._new_key(self._ca_key), *subject, "-out", self.ca)

    def sign(self, name: str) -> tuple[bytes, bytes]:
        """Returns the key and the certificate of a party at 127.0.0.1."""
        key, cert = self._folder / f"{name}.key", self._folder / f"{name}.pem"
        self._openssl(
            "req",
            "-x509",
            *self._new_key(key),
            *("-subj", f"/CN={name}", "-days", "1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-CA", self.ca, "-CAkey", self._ca_key, "-out", cert),
        )
        return key.read_bytes(), cert.read_bytes()

    def sign_expired(self, name: str) -> tuple[bytes, bytes]:
        """As `sign`, of a certificate whose time was over long ago."""
        key, request = self._folder / f"{name}.key", self._folder / f"{name}.csr"
        settings, cert = self._folder / f"{name}.cnf", self._folder / f"{name}.pem"
        (self._folder / f"{name}.index").touch()
        settings.write_text(
            f"[ca]\ndefault_ca=one\n[one]\ndatabase={self._folder / name}.index\n"
            f"new_certs_dir={self._folder}\nrand_serial=yes\ndefault_md=sha256\npolicy=any\n"
            "x509_extensions=more\n[any]\ncommonName=supplied\n"
            "[more]\nsubjectAltName=IP:127.0.0.1\n"
        )
        self._openssl("req", *self._new_key(key), "-subj", f"/CN={name}", "-out", request)
        self._openssl(
            *("ca", "-batch", "-notext", "-config", settings, "-in", request, "-out", cert),
            *("-cert", self.ca, "-keyfile", self._ca_key),
            *("-startdate", "20200101000000Z", "-enddate", "20200102000000Z"),
        )
        return key.read_bytes(), cert.read_bytes()

    def files(self, name: str, client_ca: Path | None = None) -> TlsFiles:
        self.sign(name)
        folder = self._folder
        ca = str(client_ca) if client_ca else None
        return TlsFiles(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), ca)

    def _new_key(self, key: Path) -> tuple[str | Path, ...]:
        return (
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key),
        )

    def _openssl(self, *words: str | Path) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *words], check=True, capture_output=True)

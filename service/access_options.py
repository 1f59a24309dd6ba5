"""Who may use a server, from its flags: keys and certificates."""

from __future__ import annotations

from service.flags import FlagError, Parsed
from service.key_file import BadKeyFile, KeyFile
from service.tls_files import BadCertificates, TlsFiles, check_certificates


def api_keys(parsed: Parsed) -> tuple[str, ...]:
    """All keys of the flags, those of the file as it is now included.

    Raises:
        FlagError: One is empty, or the file has none.
    """
    file = key_file(parsed)
    if file is None:
        return _named_keys(parsed)
    try:
        return file.read()
    except BadKeyFile as error:
        raise FlagError(f"--api-key-file {file.path}: {error}") from None


def key_file(parsed: Parsed) -> KeyFile | None:
    """The file of keys, if there is one.

    Raises:
        FlagError: A key beside it is empty.
    """
    path = parsed["api_key_file"]
    return KeyFile(path, _named_keys(parsed)) if path else None


def tls_files(parsed: Parsed) -> TlsFiles | None:
    """The certificates of the public doors, checked; None where none are named.

    Raises:
        FlagError: One is missing or cannot be used.
    """
    cert, key, ca = parsed["ssl_cert_file"], parsed["ssl_key_file"], parsed["ssl_client_ca_file"]
    if not cert and not key:
        if ca:
            raise FlagError("--ssl-client-ca-file: needs --ssl-cert-file and --ssl-key-file")
        return None
    if not cert or not key:
        raise FlagError("--ssl-cert-file and --ssl-key-file: each needs the other")
    files = TlsFiles(cert, key, ca)
    try:
        check_certificates(files)
    except BadCertificates as error:
        flags = "--ssl-cert-file, --ssl-key-file" + (", --ssl-client-ca-file" if ca else "")
        raise FlagError(f"{flags}: {error}") from None
    return files


def _named_keys(parsed: Parsed) -> tuple[str, ...]:
    # A key that is empty, as of an unset shell variable, must not leave the server open.
    if not all(parsed["api_keys"]):
        raise FlagError("--api-key: holds no key")
    return tuple(dict.fromkeys(key for group in parsed["api_keys"] for key in group))

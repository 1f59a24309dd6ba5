"""A running gateway is given other certificates and keys."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import httpx
import pytest

from gateway.certificates import Certificates
from gateway.keys import Keys
from gateway.options import GatewayOptions
from gateway.reload import Reloads
from tests import certificates
from tests.certificates import needs_openssl
from tests.unit.gateway.conftest import Serve

Authority = certificates.Certificates


def options_of(folder: Path, authority: Authority, client_ca: Path | None = None) -> GatewayOptions:
    files = authority.files("server", client_ca)
    ca = folder / "clients.pem"
    if client_ca:
        shutil.copy(client_ca, ca)
    return GatewayOptions(
        service="a:1",
        ssl_cert_file=files.cert_file,
        ssl_key_file=files.key_file,
        ssl_client_ca_file=str(ca) if client_ca else None,
    )


def client_context(trusted: Path, own: certificates.TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    if own:
        context.load_cert_chain(own.cert_file, own.key_file)
    return context


async def can_talk(port: int, context: ssl.SSLContext, name: str = "127.0.0.1") -> bool:
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=name
        )
    except (ssl.SSLError, ConnectionError):
        return False
    try:
        writer.write(b"hello")
        return await reader.readexactly(5) == b"hello"
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        # What a server thinks of a client's certificate comes after the handshake.
        return False
    finally:
        writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        writer.write(await reader.readexactly(5))
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@needs_openssl
async def test_new_connections_get_the_newest_certificate_and_a_bad_one_is_not_taken(
    tmp_path: Path,
) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    options = options_of(tmp_path, ours)
    assert options.ssl_cert_file is not None
    assert options.ssl_key_file is not None
    served = Certificates(options)
    reloads = Reloads([served.watched])
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=served.context)
    port = server.sockets[0].getsockname()[1]
    trust_ours, trust_other = client_context(ours.ca), client_context(other.ca)
    async with server:
        assert await can_talk(port, trust_ours)
        new = other.files("replacement")
        shutil.copy(new.cert_file, options.ssl_cert_file)
        reloads.look()
        assert await can_talk(port, trust_ours)
        shutil.copy(new.key_file, options.ssl_key_file)
        reloads.look()
        assert await can_talk(port, trust_other)
        assert not await can_talk(port, trust_ours)
    assert reloads.counts() == [(("certificates", "ok"), 1), (("certificates", "refused"), 1)]


@needs_openssl
async def test_the_authorities_of_clients_change_too(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    options = options_of(tmp_path, ours, client_ca=ours.ca)
    served = Certificates(options)
    reloads = Reloads([served.watched])
    known = client_context(ours.ca, ours.files("known"))
    stranger = client_context(ours.ca, other.files("stranger"))
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=served.context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await can_talk(port, known)
        assert not await can_talk(port, stranger)
        assert not await can_talk(port, client_context(ours.ca))
        shutil.copy(other.ca, str(options.ssl_client_ca_file))
        reloads.look()
        assert await can_talk(port, stranger)
        assert not await can_talk(port, known)


@needs_openssl
def test_a_start_with_a_bad_pair_is_refused_by_file_and_cause(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    first, second = ours.files("first"), ours.files("second")
    options = GatewayOptions(
        service="a:1", ssl_cert_file=first.cert_file, ssl_key_file=second.key_file
    )
    with pytest.raises(ValueError, match=r"first\.pem with key .*second\.key: .*mismatch"):
        Certificates(options)


async def test_keys_of_a_file_are_read_again(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    options = GatewayOptions(service="a:1", api_keys=("named",), api_key_file=str(file))
    keys = Keys(options)
    reloads = Reloads(keys.watched)

    async def opens(client: httpx.AsyncClient) -> list[str]:
        found = {
            key: (
                await client.get("/props", headers={"authorization": f"Bearer {key}"})
            ).status_code
            for key in ("old", "new", "named")
        }
        return [key for key, status in found.items() if status == 200]

    async with serve(keys=keys, reloads=reloads, has_metrics=True) as client:
        assert await opens(client) == ["old", "named"]
        file.write_text("new\n")
        reloads.look()
        assert await opens(client) == ["new", "named"]
        file.write_text("")
        reloads.look()
        assert await opens(client) == ["new", "named"]
        text = (await client.get("/metrics", headers={"authorization": "Bearer new"})).text
    for line in (
        'kvarts_http_config_reloads_total{what="api_keys",result="ok"} 1',
        'kvarts_http_config_reloads_total{what="api_keys",result="refused"} 1',
    ):
        assert line in text.splitlines()

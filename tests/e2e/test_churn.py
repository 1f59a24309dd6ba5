"""Check 24: connections that come and go, half of them cut amid TLS, and too few open files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import ssl
from collections.abc import Generator

import grpc
import pytest
from kvarts.v1 import model_pb2, model_pb2_grpc

from tests.certificates import Certificates, needs_openssl
from tests.e2e.conftest import Start
from tests.e2e.programs import Program
from tests.waiting import until

pytestmark = [pytest.mark.slow, needs_openssl]

_CONNECTS, _AT_ONCE = 5_000, 100
_MOST_FILES = 256


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture
def program(start: Start, certificates: Certificates) -> Generator[Program]:
    tls = certificates.files("server")
    flags = ("--ssl-cert-file", tls.cert_file, "--ssl-key-file", tls.key_file)
    with start("--grpc-port", "0", *flags) as program:
        yield program.ready()


def _num_files(program: Program) -> int:
    return len(os.listdir(f"/proc/{program.process.pid}/fd"))


def _address(program: Program) -> tuple[str, int]:
    host, _, port = program.grpc_address().rpartition(":")
    return host, int(port)


async def _served(program: Program, ca: bytes) -> bool:
    """Whether a client that comes now is answered."""
    credentials = grpc.ssl_channel_credentials(ca)
    # A channel of its own, which no other has connected before.
    options = (("grpc.use_local_subchannel_pool", 1),)
    address = program.grpc_address()
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        try:
            await stub.GetModel(model_pb2.GetModelRequest(), timeout=10)
        except grpc.aio.AioRpcError:
            return False
    return True


async def _connect(address: tuple[str, int], context: ssl.SSLContext, *, is_cut: bool) -> None:
    """A whole handshake, or one that ends within its first message."""
    if not is_cut:
        with contextlib.suppress(ConnectionError, TimeoutError):
            _, writer = await asyncio.open_connection(
                *address, ssl=context, server_hostname=address[0]
            )
            writer.close()
        return
    hello = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=address[0])
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    first = hello.read()
    _, writer = await asyncio.open_connection(*address)
    writer.write(first[: len(first) // 2])
    await writer.drain()
    writer.transport.abort()


async def test_connects_that_are_cut_leave_nothing(
    program: Program, certificates: Certificates
) -> None:
    ca, address = certificates.ca.read_bytes(), _address(program)
    context = ssl.create_default_context(cafile=str(certificates.ca))
    context.set_alpn_protocols(["h2"])
    assert await _served(program, ca)
    files, turns = _num_files(program), asyncio.Semaphore(_AT_ONCE)

    async def run(number: int) -> None:
        async with turns:
            await _connect(address, context, is_cut=number % 2 == 0)

    await asyncio.gather(*(run(number) for number in range(_CONNECTS)))
    assert await _served(program, ca)

    async def left() -> int:
        return _num_files(program)

    # The kernel tells of a closed connection a little later.
    await until(left, lambda count: count <= files)


async def test_a_server_out_of_files_recovers(program: Program, certificates: Certificates) -> None:
    """`ulimit -n 256`, set on the running process so that no test's own start is cut short."""
    ca, address = certificates.ca.read_bytes(), _address(program)
    assert await _served(program, ca)
    before = _num_files(program)
    resource.prlimit(program.process.pid, resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(2 * _MOST_FILES):
            _, writer = await asyncio.open_connection(*address)
            writers.append(writer)

        async def held() -> int:
            return _num_files(program)

        await until(held, lambda count: count >= _MOST_FILES - 1)
        assert program.process.poll() is None
    finally:
        for writer in writers:
            writer.transport.abort()
    await until(held, lambda count: count <= before + 2)

    async def is_served() -> bool:
        return await _served(program, ca)

    await until(is_served, bool)

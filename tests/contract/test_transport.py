"""TLS, client certificates, reflection and the doors of a server."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from kvarts.v1 import model_pb2, model_pb2_grpc

from service.server import Server
from service.tls_files import TlsFiles
from tests.certificates import Certificates, needs_openssl
from tests.contract.serving import fake_model, options, serving
from tests.fakes import fake_engine

BUF = shutil.which("buf", path=str(Path(sys.executable).parent))
needs_buf = pytest.mark.skipif(BUF is None, reason="calls the server with buf")


@asynccontextmanager
async def server_with(tls: TlsFiles) -> AsyncGenerator[int]:
    server = Server(options(tls=tls))
    await server.start()
    await server.load(lambda sink: fake_model(fake_engine(sink)))
    assert server.port is not None
    try:
        yield server.port
    finally:
        await server.stop(1)


async def can_call(port: int, credentials: grpc.ChannelCredentials | None) -> bool:
    target = f"127.0.0.1:{port}"
    channel = (
        grpc.aio.secure_channel(target, credentials)
        if credentials
        else grpc.aio.insecure_channel(target)
    )
    async with channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        try:
            await stub.GetModel(model_pb2.GetModelRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


@needs_openssl
async def test_tls(tmp_path: Path) -> None:
    ours, other = Certificates(tmp_path, "ours"), Certificates(tmp_path, "other")
    async with server_with(ours.files("server")) as port:
        assert await can_call(port, grpc.ssl_channel_credentials(ours.ca.read_bytes()))
        assert not await can_call(port, grpc.ssl_channel_credentials(other.ca.read_bytes()))
        assert not await can_call(port, None)


@needs_openssl
async def test_client_certificates(tmp_path: Path) -> None:
    ours, other = Certificates(tmp_path, "ours"), Certificates(tmp_path, "other")
    root = ours.ca.read_bytes()
    async with server_with(ours.files("server", client_ca=ours.ca)) as port:
        assert await can_call(port, grpc.ssl_channel_credentials(root, *ours.sign("client")))
        assert not await can_call(port, grpc.ssl_channel_credentials(root))
        stranger = grpc.ssl_channel_credentials(root, *other.sign("stranger"))
        assert not await can_call(port, stranger)


@needs_openssl
async def test_certificates_whose_time_is_over(tmp_path: Path) -> None:
    """Check 36: a client's is refused, a server's is not believed."""
    ours = Certificates(tmp_path, "ours")
    root = ours.ca.read_bytes()
    async with server_with(ours.files("server", client_ca=ours.ca)) as port:
        assert await can_call(port, grpc.ssl_channel_credentials(root, *ours.sign("client")))
        late = grpc.ssl_channel_credentials(root, *ours.sign_expired("late"))
        assert not await can_call(port, late)
    ours.sign_expired("old")
    async with server_with(
        TlsFiles(str(tmp_path / "old.pem"), str(tmp_path / "old.key"), None)
    ) as port:
        assert not await can_call(port, grpc.ssl_channel_credentials(root))


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_every_service(version: str) -> None:
    async with serving() as it:
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        reply = await it.reflect(path)
    for name in ("Generation", "Tokenization", "Embedding", "Model", "Slot", "Lora", "Rebuild"):
        assert f"kvarts.v1.{name}Service".encode() in reply
    assert b"grpc.health.v1.Health" in reply


async def test_reflection_describes_the_details_of_errors() -> None:
    """What grpcurl needs to show them as more than bytes."""
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    async with serving() as it:
        for name in ("ErrorInfo", "BadRequest", "RetryInfo"):
            ask = reflection_pb2.ServerReflectionRequest(
                file_containing_symbol=f"google.rpc.{name}"
            )
            untyped: Any = it.channel
            call = untyped.stream_stream(path)(iter((ask.SerializeToString(),)))
            (reply,) = [
                reflection_pb2.ServerReflectionResponse.FromString(data) async for data in call
            ]
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(data).name
                for data in reply.file_descriptor_response.file_descriptor_proto
            ]
            assert "google/rpc/error_details.proto" in files


@needs_buf
async def test_buf_curl_reads_the_contract_by_reflection(tmp_path: Path) -> None:
    async with serving() as it:
        url = f"http://127.0.0.1:{it.server.port}/kvarts.v1.GenerationService/Generate"
        assert BUF is not None
        process = await asyncio.create_subprocess_exec(
            *(BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge"),
            *("-d", '{"text":"Hi","maxTokens":2,"sampling":{"temperature":0}}', url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    events = [json.loads(line) for line in _objects(out.decode())]
    assert [next(iter(event)) for event in events] == ["started", "chunk", "chunk", "finished"]
    assert events[-1]["finished"]["finishReason"] == "FINISH_REASON_LENGTH"


def _objects(text: str) -> list[str]:
    """Splits concatenated JSON objects."""
    decoder = json.JSONDecoder()
    found: list[str] = []
    rest = text.strip()
    while rest:
        _, end = decoder.raw_decode(rest)
        found.append(rest[:end])
        rest = rest[end:].strip()
    return found


async def test_both_doors_open_the_same_service(tmp_path: Path) -> None:
    socket = tmp_path / "s.sock"
    async with serving(private_socket=str(socket)) as it:
        assert it.server.addresses == (f"unix:{socket}", f"127.0.0.1:{it.server.port}")
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stub = model_pb2_grpc.ModelServiceStub(channel)
            through_socket = await stub.GetModel(model_pb2.GetModelRequest())
        assert through_socket == await it.model.GetModel(model_pb2.GetModelRequest())

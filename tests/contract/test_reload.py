"""A running server is given other certificates and keys: nothing is dropped, nothing bad is taken."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterable
from pathlib import Path

import grpc
import pytest
from kvarts.v1 import generation_pb2_grpc

from service.key_file import KeyFile
from tests.certificates import Certificates, needs_openssl
from tests.contract.serving import (
    GenerateRequest,
    GenerateResponse,
    StepGate,
    gated_runner,
    serving,
)
from tests.contract.test_transport import can_call

LONG = GenerateRequest(text="a long one", ignore_eos=True, max_tokens=20)


@needs_openssl
async def test_certificates_rotate_under_eight_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = Certificates(tmp_path, "ours"), Certificates(tmp_path, "other")
    tls = ours.files("server")
    cert, key = Path(tls.cert_file), Path(tls.key_file)
    trust_ours = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    trust_other = grpc.ssl_channel_credentials(other.ca.read_bytes())
    gate = StepGate()
    async with serving(tls=tls, runner=gated_runner(gate)) as it:
        port = it.server.port
        assert port is not None
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trust_ours) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            calls = [stub.Generate(LONG) for _ in range(8)]
            running = [asyncio.ensure_future(_count_chunks(call)) for call in calls]
            await gate.arrival()
            other_files = other.files("replacement")
            shutil.copy(other_files.cert_file, cert)
            with caplog.at_level(logging.INFO, "kvarts.service"):
                it.server.reloads.look()
                assert "does not match" in caplog.text or "mismatch" in caplog.text
                assert "the old stays in force" in caplog.text
            # A certificate without its key is not taken.
            assert await can_call(port, trust_ours)
            shutil.copy(other_files.key_file, key)
            it.server.reloads.look()
            assert await can_call(port, trust_other)
            assert not await can_call(port, trust_ours)
            for damaged in ("", "no pem"):
                await asyncio.to_thread(cert.write_text, damaged)
                it.server.reloads.look()
                assert await can_call(port, trust_other)
            gate.open()
            assert await asyncio.gather(*running) == [20] * 8


async def _count_chunks(call: AsyncIterable[GenerateResponse]) -> int:
    return sum([response.HasField("chunk") async for response in call])


async def test_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = KeyFile(str(file), ("named",))
    async with serving(api_keys=keys.read(), key_file=keys, metrics_port=0) as it:

        async def opens(key: str) -> bool:
            metadata = (("authorization", f"Bearer {key}"),)
            try:
                await it.collect(GenerateRequest(text="a", max_tokens=1), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False
            return True

        assert [await opens(key) for key in ("old", "new", "named")] == [True, False, True]
        file.write_text("new\n")
        it.server.reloads.look()
        assert [await opens(key) for key in ("old", "new", "named")] == [False, True, True]
        file.write_text("# nothing\n")
        it.server.reloads.look()
        assert [await opens(key) for key in ("old", "new", "", "# nothing")] == [
            False,
            True,
            False,
            False,
        ]

"""The gateway as a process: its command line, its listeners, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from gateway import flags, listeners
from gateway.keys import Keys
from gateway.options import GatewayOptions, encode_options
from tests.unit.gateway.conftest import until_ready
from tests.unit.gateway.fake_service import FakeService


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(root / "proto")])
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


async def listening(process: asyncio.subprocess.Process) -> str:
    """The address in the line that tells it."""
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    assert "listening on" in line, line
    return line.split()[-1]


async def test_a_child_ends_with_its_parents_pipe(service: FakeService):
    options = GatewayOptions(service=await service.start(), port=0, api_keys=("key",))
    process = await spawn("--options-stdin")
    assert process.stdin is not None
    process.stdin.write(encode_options(options))
    await process.stdin.drain()
    async with httpx.AsyncClient(base_url=await listening(process)) as client:
        await until_ready(client)
        assert (await client.get("/props")).status_code == 401
    process.stdin.close()
    assert await process.wait() == 0


async def test_a_signal_ends_it_with_status_0(service: FakeService):
    address = await service.start()
    process = await spawn("--service", address, "--port", "0")
    async with httpx.AsyncClient(base_url=await listening(process)) as client:
        await until_ready(client)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_unix_sockets(service: FakeService, tmp_path: Path):
    path = tmp_path / "gateway.sock"
    # What a server that was killed leaves behind.
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    process = await spawn("--service", await service.start(), "--host", str(path))
    assert await listening(process) == f"unix://{path}"
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(base_url="http://local", transport=transport) as client:
        await until_ready(client)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        ((), "--service: the address of the service is required"),
        (("--service", "a:1", "--port", "99999"), "--port '99999'"),
        (("--service", "a:1", "--api-key", ""), "--api-key: holds no key"),
        (("--service", "a:1", "--host", "127.0.0.1,::1", "--port", "0"), "--port 0"),
    ],
)
async def test_what_cannot_start_exits_1_with_one_line(arguments: tuple[str, ...], message: str):
    process = await spawn(*arguments)
    _, error = await process.communicate()
    assert process.returncode == 1
    assert error.decode().startswith("kvarts-gateway: ")
    assert message in error.decode()
    assert error.count(b"\n") == 1


async def test_an_open_gateway_says_so_unless_its_parent_does(service: FakeService):
    address = await service.start()
    process = await spawn("--service", address, "--host", "0.0.0.0", "--port", "0")
    assert process.stderr is not None
    lines = [(await process.stderr.readline()).decode() for _ in range(5)]
    assert "0.0.0.0 can be reached from other machines" in lines[1]
    await listening(process)
    process.kill()
    await process.wait()

    child = await spawn("--options-stdin")
    assert child.stdin is not None
    options = GatewayOptions(service=address, hosts=("0.0.0.0",), port=0)
    child.stdin.write(encode_options(options))
    await child.stdin.drain()
    await listening(child)
    child.stdin.close()
    assert await child.wait() == 0


def test_every_option_has_a_flag():
    options = {flag.option for flag in flags.FLAGS}
    assert options == set(GatewayOptions.__struct_fields__)


def test_flags_win_over_variables():
    options = flags.parse(
        ["--service", "a:1", "--host", "127.0.0.1, x.sock", "--no-slots", "--api-prefix", "/llm/"],
        {
            "KVARTS_SERVICE": "b:2",
            "KVARTS_PORT": " 9 ",
            "KVARTS_METRICS": "on",
            "KVARTS_NO_UI": "off",
            "KVARTS_TAGS": "",
        },
    )
    assert (options.service, options.port) == ("a:1", 9)
    assert options.hosts == ("127.0.0.1", "x.sock")
    assert (options.has_slots, options.has_metrics, options.has_ui) == (False, True, True)
    assert options.api_prefix == "/llm"


def test_keys_of_a_file_are_added_to_those_of_the_flag(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# mine\nsesame\n\n second \n")
    options = flags.parse(
        ["--service", "a:1", "--api-key", "named", "--api-key-file", str(file)], {}
    )
    keys = Keys(options)
    assert all(keys.knows(key) for key in ("named", "sesame", "second"))
    assert not keys.is_open
    assert not any(keys.knows(key) for key in ("", "# mine", " second ", "other"))


def test_help_shows_defaults_where_there_are_some():
    shown = " ".join(flags.help_text().split())
    assert "the system choose (default: 8080) [KVARTS_PORT]" in shown
    assert "is a Unix socket (default: 127.0.0.1) [KVARTS_HOST]" in shown
    assert "on or off (default: on) [KVARTS_CORS_CREDENTIALS]" in shown
    assert "or unix:/PATH [KVARTS_SERVICE]" in shown
    assert "serve /metrics [KVARTS_METRICS]" in shown


def test_addresses_in_use_are_refused_and_nothing_stays_bound():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = GatewayOptions(service="x", hosts=("::1", "127.0.0.1"), port=port)
        with pytest.raises(
            OSError, match=rf"127.0.0.1:{port}: Address already in use \(see --port\)"
        ):
            listeners.bind_all(options)
        again = GatewayOptions(service="x", hosts=("::1",), port=port)
        bound = listeners.bind_all(again)
        assert listeners.addresses(bound, is_tls=True) == [f"https://[::1]:{port}"]
        for listener in bound:
            listener.close()


def test_a_live_unix_socket_is_not_taken_over(tmp_path: Path):
    path = str(tmp_path / "a.sock")
    options = GatewayOptions(service="x", hosts=(path,))
    first = listeners.bind_all(options)
    with pytest.raises(OSError, match=r"a.sock: Address already in use \(see --host\)"):
        listeners.bind_all(options)
    first[0].close()
    listeners.unlink_all([path])
    listeners.unlink_all([path])

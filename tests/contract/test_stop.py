"""What a stop leaves behind: nothing, however many calls it cuts."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import textwrap
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.server import READY_SERVICE

_ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 5
# They all wait on one lock, so that the last of them takes many turns of the loop to end.
NUM_WATCHERS = 64

# Serves once per line of its stdin. Its loop ends as soon as the server has stopped.
_PROGRAM = """
    import asyncio, logging, sys
    from service.server import serve
    from tests.contract.serving import fake_model, options
    from tests.fakes import fake_engine

    async def main(socket):
        stop = asyncio.Event()
        given = options(grpc_port=None, private_socket=socket, shutdown_timeout_s=0)
        load = lambda sink: fake_model(fake_engine(sink))
        serving = asyncio.create_task(serve(given, stop, load))
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()
        print(await serving, flush=True)

    logging.basicConfig(level=logging.WARNING)
    for socket in sys.argv[1:]:
        asyncio.run(main(socket))
"""


async def test_a_stop_under_open_watches_leaves_nothing_for_the_loop_to_cancel() -> None:
    with tempfile.TemporaryDirectory(prefix="ks-") as folder:
        sockets = [os.path.join(folder, f"{i}.sock") for i in range(NUM_ROUNDS)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", textwrap.dedent(_PROGRAM), *sockets),
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'proto'}"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            for socket in sockets:
                async with AsyncExitStack() as stack:
                    watches = [await _watching(stack, socket) for _ in range(NUM_WATCHERS)]
                    process.stdin.write(b"\n")
                    assert await process.stdout.readline() == b"0\n"
                    assert not any(watch.cancelled() for watch in watches)
            assert (await process.stderr.read()).decode() == ""
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _watching(stack: AsyncExitStack, socket: str) -> Any:
    """Opens a watch on a connection of its own; returns when it has been answered once."""
    local = (("grpc.use_local_subchannel_pool", 1),)
    channel = grpc.aio.insecure_channel(f"unix:{socket}", options=local)
    stub: Any = health_pb2_grpc.HealthStub(await stack.enter_async_context(channel))
    request = health_pb2.HealthCheckRequest(service=READY_SERVICE)
    watch = stub.Watch(request, wait_for_ready=True)
    await watch.read()
    return watch

"""kvarts-server: the service in this process and the gateway as its child, as one server.

The gateway starts first, so that HTTP answers "Loading model" while the service loads. It gets its
options as one line on stdin, and the pipe then stays open. Closing it is the order to stop: however
this process ends, the kernel closes it, so that nothing is ever orphaned. The two talk over a
Unix socket in a folder of this user alone; the public gRPC door, if asked for, is a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine.memory.allocator import limit_heaps
from service.command_line import ServerOptions, server_command_line
from service.exit import leave
from service.exposure import exposure_warning
from service.logs import configure
from service.options import ServiceOptions
from service.private_folder import SOCKET, private_folder

# -P: a folder named `gateway` where the user happens to stand is not ours.
_GATEWAY = (sys.executable, "-P", "-m", "gateway", "--options-stdin")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Beyond --shutdown-timeout: how long the gateway may take to end, and then the whole server. By
# default 2 + 2 seconds, since whoever started a server commonly kills it after 5.
_CHILD_MARGIN_S = 1.0
_STOP_MARGIN_S = 2.0

# Serves until the event is set; returns the exit status.
Serve = Callable[[ServiceOptions, asyncio.Event], Awaitable[int]]


def main() -> NoReturn:
    """Runs kvarts-server, then ends the process."""
    # Imports leave no cycles worth looking for; the load turns the collector on again.
    gc.disable()
    limit_heaps()
    options = server_command_line(sys.argv[1:], os.environ)
    service = options.service
    configure(service.log_format, service.log_level, service.log_file)
    if service.checks_only:
        # The engine's imports take a second, which the gateway must not wait for otherwise.
        from service.check import run_check

        leave(run_check("kvarts-server", service))
    leave(launch(options, _serve))


def launch(options: ServerOptions, serve: Serve, gateway: Sequence[str] = _GATEWAY) -> int:
    """Runs both halves until a signal, a failure or the end of either stops both.

    Args:
        options: what was asked for.
        serve: runs the service.
        gateway: the child's command; a test replaces it.

    Returns:
        0 after a signal, the gateway's status if it ended by itself, else that of `serve`.
    """
    _warn(options)
    with private_folder() as folder:
        socket = folder / SOCKET
        child = subprocess.Popen(
            gateway,
            stdin=subprocess.PIPE,
            # Of its own group, so that Ctrl-C reaches this process alone, which passes it on once.
            process_group=0,
        )
        try:
            _send(child, options.gateway_line(f"unix:{socket}"))
            server = _Server(child, folder, options.service.shutdown_timeout_s)
            return server.run(replace(options.service, private_socket=str(socket)), serve)
        finally:
            _end(child, options.service.shutdown_timeout_s)


class _Server:
    """One run: what a signal and the child's end do to it."""

    def __init__(
        self, child: subprocess.Popen[bytes], folder: Path, shutdown_timeout_s: float
    ) -> None:
        self._child = child
        self._folder = folder
        self._limit_s = shutdown_timeout_s + _STOP_MARGIN_S
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def run(self, options: ServiceOptions, serve: Serve) -> int:
        """Serves; returns the exit status."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            status = asyncio.run(self._run(options, serve))
        except _Stopped:
            return 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0 if self._signals else status

    async def _run(self, options: ServiceOptions, serve: Serve) -> int:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch_child, daemon=True, name="gateway-watch").start()
        status = await serve(options, self._stop)
        ended = self._child.poll()
        if ended is not None and not self._signals:
            sys.stderr.write(f"kvarts-server: the gateway ended with status {ended}\n")
            return ended if ended > 0 else 1
        return status

    def _watch_child(self) -> None:
        self._child.wait()
        self._request_stop()

    def _request_stop(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is None or stop is None:
            return
        try:
            loop.call_soon_threadsafe(stop.set)
        except RuntimeError:
            # The loop is closed: there is nothing left to stop.
            return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._force(128 + number)
        _close_pipe(self._child)
        limit = threading.Timer(self._limit_s, self._force, (1,))
        limit.daemon = True
        limit.start()
        if self._loop is None:
            raise _Stopped
        self._request_stop()

    def _force(self, status: int) -> None:
        """Ends everything now; a thread that is deep in a compilation cannot be asked to."""
        self._child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        leave(status)


class _Stopped(BaseException):
    """A signal came before there was a loop to tell."""


def _send(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        # It ended before it read: its own message says why, and the watcher sees it.
        return


def _close_pipe(child: subprocess.Popen[bytes]) -> None:
    """Asks the gateway to end. A signal besides would be its second, which means at once."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()


def _end(child: subprocess.Popen[bytes], shutdown_timeout_s: float) -> None:
    """Ends the gateway by its pipe, and by force if it takes too long."""
    _close_pipe(child)
    try:
        child.wait(shutdown_timeout_s + _CHILD_MARGIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _warn(options: ServerOptions) -> None:
    hosts = list(options.parsed["hosts"])
    if options.service.grpc_port is not None:
        hosts.append(options.service.grpc_host)
    warning = exposure_warning(hosts, has_key=bool(options.service.api_keys))
    if warning:
        sys.stderr.write(warning + "\n")


async def _serve(options: ServiceOptions, stop: asyncio.Event) -> int:
    # Imported only now: the gateway must answer before the engine's imports are through.
    from service.server import serve

    return await serve(options, stop)


if __name__ == "__main__":
    main()

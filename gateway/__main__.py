"""The gateway's process: `kvarts-gateway` from a command line, or a child told by its stdin.

With `--options-stdin` the first line of stdin is the options and the end of stdin is the order to
stop: a parent that dies, however it dies, takes its gateway with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from gateway import flags, listeners, logs
from gateway.accept_faults import AcceptFaults
from gateway.app import make_app
from gateway.certificates import Certificates
from gateway.exposure import exposure_warning
from gateway.keys import Keys
from gateway.options import MAX_OPTIONS_BYTES, GatewayOptions, decode_options
from gateway.protocol import http_protocol
from gateway.reload import Reloads
from gateway.service import connect
from gateway.tracing import PASSED_ON, Spans

OPTIONS_STDIN = "--options-stdin"
_LOG = logging.getLogger("gateway")
_KEEP_ALIVE_S = 60
# A collection every few requests, where Python's own 700 means several within each.
_COLLECT_AFTER = 10_000


class _Server(uvicorn.Server):
    """uvicorn, without its habit of dying by the signal that stopped it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Ends gracefully; asked a second time, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def main() -> None:
    """Runs the gateway; exits 1 with one line on stderr where it cannot start."""
    arguments = sys.argv[1:]
    is_child = arguments == [OPTIONS_STDIN]
    try:
        options = _options(arguments, is_child=is_child)
        logs.configure(options.log_format, options.log_level)
        parts = _Parts.of(options)
        if options.checks_only:
            sys.stdout.write("kvarts-gateway: all is well\n")
            return
        # A parent warns of its gateway's addresses itself.
        warning = None if is_child else exposure_warning(options)
        if warning:
            sys.stderr.write(warning + "\n")
        # What was imported stays: no collection needs to look at it again.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        asyncio.run(_serve(options, parts, is_child=is_child))
    except (flags.FlagError, OSError, ValueError) as error:
        sys.stderr.write(f"kvarts-gateway: {error}\n")
        sys.exit(1)


def _options(arguments: list[str], *, is_child: bool) -> GatewayOptions:
    if not is_child:
        return flags.parse(arguments, os.environ)
    return decode_options(_first_line(sys.stdin.fileno()))


def _first_line(descriptor: int) -> bytes:
    """Reads one line without taking what comes after it, so that the end of stdin can be seen."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= MAX_OPTIONS_BYTES:
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


@dataclass(frozen=True)
class _Parts:
    """What is read from files before anything is opened."""

    keys: Keys
    certificates: Certificates | None

    @classmethod
    def of(cls, options: GatewayOptions) -> _Parts:
        """Raises OSError or ValueError for a file that cannot be used."""
        return cls(Keys(options), Certificates(options) if options.ssl_cert_file else None)

    def reloads(self) -> Reloads:
        """What is read again when it changes; everything else takes a restart."""
        own = [self.certificates.watched] if self.certificates else []
        return Reloads([*own, *self.keys.watched])


async def _serve(options: GatewayOptions, parts: _Parts, *, is_child: bool) -> None:
    asyncio.get_running_loop().set_exception_handler(AcceptFaults())
    sockets = listeners.bind_all(options)
    socket_files = listeners.socket_files(sockets)
    service = connect(options)
    spans = _spans(options)
    reloads = parts.reloads()
    app = make_app(options, service, keys=parts.keys, reloads=reloads, spans=spans)
    server = _Server(_config(options, app, parts.certificates))
    watching = asyncio.create_task(reloads.watch())
    if is_child:
        _watch_stdin(server)
    for address in listeners.addresses(sockets, is_tls=options.ssl_cert_file is not None):
        _LOG.info("listening on %s", address)
    try:
        await server.serve(sockets)
    finally:
        watching.cancel()
        listeners.unlink_all(socket_files)
        await service.channel.close()
        await asyncio.to_thread(spans.close)


def _spans(options: GatewayOptions) -> Spans:
    if options.otlp_endpoint is None:
        return PASSED_ON
    # Of the extra `otel`, which whoever made the options has made sure of.
    from gateway.otel import otlp_spans

    return otlp_spans(options.otlp_endpoint)


def _watch_stdin(server: _Server) -> None:
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            server.stop()

    loop.add_reader(descriptor, readable)


def _config(
    options: GatewayOptions, app: ASGIApp, certificates: Certificates | None
) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=http_protocol(options.timeout_s),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # Declared as whole seconds, used as any number.
        timeout_graceful_shutdown=cast(int, options.shutdown_timeout_s),
    )
    config.load()
    # Its own context would be read once and for all.
    config.ssl = certificates.context if certificates else None
    return config


if __name__ == "__main__":
    main()

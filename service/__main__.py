"""kvarts-service: the gRPC service as a process of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from typing import NoReturn

from engine.memory.allocator import limit_heaps
from service.command_line import service_command_line
from service.exit import leave
from service.exposure import exposure_warning
from service.logs import configure
from service.options import ServiceOptions
from service.server import serve

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Beyond the shutdown timeout: a thread that is deep in a compilation cannot be asked to end.
_STOP_MARGIN_S = 2.0


def main() -> NoReturn:
    """Runs kvarts-service until a signal, then ends the process."""
    # Imports leave no cycles worth looking for; the load turns the collector on again.
    gc.disable()
    limit_heaps()
    options = service_command_line(sys.argv[1:], os.environ)
    configure(options.log_format, options.log_level, options.log_file)
    if options.checks_only:
        # jax takes a second to import.
        from service.check import run_check

        leave(run_check("kvarts-service", options))
    warning = exposure_warning([options.grpc_host], has_key=bool(options.api_keys))
    if warning:
        sys.stderr.write(warning + "\n")
    # Every signal and every failure has been answered by now: see `leave`.
    leave(asyncio.run(_run(options)))


async def _run(options: ServiceOptions) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _on_signal, loop, stop, options, number)
    return await serve(options, stop)


def _on_signal(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, options: ServiceOptions, number: int
) -> None:
    """The first signal asks, a second one ends the process at once."""
    if stop.is_set():
        leave(128 + number)
    stop.set()
    loop.call_later(options.shutdown_timeout_s + _STOP_MARGIN_S, leave, 1)


if __name__ == "__main__":
    main()

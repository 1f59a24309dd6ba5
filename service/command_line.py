"""From the words typed to frozen options, for both programs that take llama-server's flags.

Ends the process on --help and --version (0) and on a command line that cannot be honoured (1, one
line on stderr), as llama-server does.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from service.flag_help import render_help
from service.flag_table import FLAGS
from service.flags import Flag, FlagError, Parsed, Scope, parse, wants
from service.named_files import refuse_missing
from service.options import (
    SERVICE_PORT,
    ServiceOptions,
    config_file_paths,
    gateway_options,
    service_options,
)

_SERVER_SUMMARY = (
    "Serves a GGUF model over llama.cpp's HTTP and, with --grpc-port, over gRPC. Takes "
    "llama-server's flags."
)
_SERVICE_SUMMARY = "Serves a GGUF model over gRPC. Takes those of llama-server's flags that apply."


@dataclass(frozen=True)
class ServerOptions:
    """Both halves of kvarts-server."""

    service: ServiceOptions
    parsed: Parsed
    own_key: str = field(repr=False)

    def gateway_line(self, service_address: str) -> bytes:
        """The options of the gateway, as the line of JSON that it reads."""
        return gateway_options(self.parsed, service_address, self.own_key)


def server_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> ServerOptions:
    """Reads the command line of kvarts-server; may end the process."""
    _answer_questions("kvarts-server", _SERVER_SUMMARY, argv, FLAGS)
    try:
        parsed = _parse(argv, environ, FLAGS)
        own_key = secrets.token_hex(32)
        service = replace(service_options(parsed), own_key=own_key)
        options = ServerOptions(service, parsed, own_key)
        options.gateway_line("")
        _look_at_files(service)
    except FlagError as error:
        _refuse("kvarts-server", error)
    return options


def service_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> ServiceOptions:
    """Reads the command line of kvarts-service; may end the process."""
    _answer_questions("kvarts-service", _SERVICE_SUMMARY, argv, _without_gateway())
    try:
        _check_scope(argv)
        options = service_options(_parse(argv, environ, FLAGS))
        _look_at_files(options)
    except FlagError as error:
        _refuse("kvarts-service", error)
    if options.grpc_port is None:
        return replace(options, grpc_port=SERVICE_PORT)
    return options


def _look_at_files(options: ServiceOptions) -> None:
    # A check tells of all files, and of more than whether they are there.
    if not options.checks_only:
        refuse_missing(options)


def _without_gateway() -> tuple[Flag, ...]:
    return tuple(flag for flag in FLAGS if flag.scope is not Scope.GATEWAY)


def _check_scope(argv: Sequence[str]) -> None:
    for flag in FLAGS:
        names = (*flag.names, *flag.off_names)
        if flag.scope is Scope.GATEWAY and names and wants(argv, names):
            raise FlagError(f"{names[-1]}: is a flag of kvarts-server and kvarts-gateway")


def _parse(argv: Sequence[str], environ: Mapping[str, str], flags: Sequence[Flag]) -> Parsed:
    texts = [_config_text(path) for path in config_file_paths(environ) if path.is_file()]
    return parse(argv, environ, flags, config_files=texts)


def _config_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{path}: {error}") from None


def _answer_questions(
    program: str, summary: str, argv: Sequence[str], flags: Sequence[Flag]
) -> None:
    if wants(argv, ("-h", "--help", "--usage")):
        sys.stdout.write(render_help(program, summary, flags))
        raise SystemExit(0)
    if wants(argv, ("--version",)):
        sys.stdout.write(f"{program} {version('kvarts')}\n")
        raise SystemExit(0)


def _refuse(program: str, error: FlagError) -> NoReturn:
    sys.stderr.write(f"{program}: error: {error}\n")
    raise SystemExit(1)

"""The command line of `kvarts-gateway`: one table that fills `GatewayOptions`.

Flags are llama-server's where it has them. Each also reads `KVARTS_<NAME>`; the command line wins.
`kvarts-server` does not come through here: it hands over the finished options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from gateway.options import GatewayOptions


class FlagError(ValueError):
    """A command line that cannot be understood."""


_SUMMARY = """A llama.cpp-compatible REST gateway in front of a Kvarts service, whose --service is required.
The command line wins over a variable."""


@dataclass(frozen=True)
class Flag:
    """One flag and the option it fills. Without `convert` it takes no value and means `present`."""

    names: tuple[str, ...]
    option: str
    help: str
    convert: Callable[[str], Any] | None = None
    present: bool = True

    @property
    def variable(self) -> str:
        """The environment variable behind it."""
        return "KVARTS_" + self.names[-1].lstrip("-").replace("-", "_").upper()


def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _keys_of_file(path: str) -> tuple[str, ...]:
    lines = (line.strip() for line in Path(path).read_text().splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _prefix(text: str) -> str:
    prefix = text.rstrip("/")
    if prefix and not prefix.startswith("/"):
        raise ValueError("must start with /")
    return prefix


def _truth(text: str) -> bool:
    if text.lower() in ("on", "enabled", "true", "1"):
        return True
    if text.lower() in ("off", "disabled", "false", "0"):
        return False
    raise ValueError("must be on or off")


def _object(text: str) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any])


FLAGS: tuple[Flag, ...] = (
    Flag(("--service",), "service", "address of the service: HOST:PORT or unix:/PATH", str),
    Flag(("--service-ca-file",), "service_ca_file", "PEM authorities of the service: use TLS", str),
    Flag(("--service-cert-file",), "service_cert_file", "PEM certificate shown to it", str),
    Flag(("--service-key-file",), "service_key_file", "PEM private key of that certificate", str),
    Flag(("--service-key",), "service_key", "API key for the gateway's own calls", str),
    Flag(("--host",), "hosts", "addresses, comma separated; NAME.sock is a Unix socket", _list),
    Flag(("--port",), "port", "TCP port; 0 lets the system choose", int),
    Flag(("--api-key",), "api_keys", "keys that open the routes, comma separated", _list),
    Flag(
        ("--api-key-file",),
        "api_keys",
        "file with one key a line; # starts a comment",
        _keys_of_file,
    ),
    Flag(("--api-prefix",), "api_prefix", "path prefix of every route", _prefix),
    Flag(("--path",), "static_path", "directory served below /", str),
    Flag(("-to", "--timeout"), "timeout_s", "longest silence of a client, s", int),
    Flag(("--shutdown-timeout",), "shutdown_timeout_s", "time to end after a signal, s", float),
    Flag(
        ("--sse-ping-interval",), "sse_ping_interval_s", "silence before a ping, s; 0 is never", int
    ),
    Flag(("--cors-origins",), "cors_origins", "allowed origin, * or localhost", str),
    Flag(("--cors-methods",), "cors_methods", "allowed methods", str),
    Flag(("--cors-headers",), "cors_headers", "allowed headers", str),
    Flag(("--cors-credentials",), "cors_credentials", "on or off", _truth),
    Flag(("--metrics",), "has_metrics", "serve /metrics"),
    Flag(("--props",), "has_props", "accept POST /props"),
    Flag(("--no-slots",), "has_slots", "do not serve GET /slots", present=False),
    Flag(("--no-ui",), "has_ui", "no page at /", present=False),
    Flag(("--ssl-cert-file",), "ssl_cert_file", "PEM certificate chain: speak HTTPS", str),
    Flag(("--ssl-key-file",), "ssl_key_file", "PEM private key of that chain", str),
    Flag(("--ssl-client-ca-file",), "ssl_client_ca_file", "PEM authorities for clients", str),
    Flag(("-a", "--alias"), "aliases", "names of the model, comma separated", _list),
    Flag(("--tags",), "tags", "tags of the model, comma separated", _list),
    Flag(("--no-jinja",), "use_jinja", "built-in chat formats only", present=False),
    Flag(
        ("--no-prefill-assistant",),
        "prefill_assistant",
        "close a last message of the assistant instead of continuing it",
        present=False,
    ),
    Flag(("--chat-template-kwargs",), "chat_template_kwargs", "template variables, JSON", _object),
    Flag(("-v", "--verbose"), "is_verbose", "answers carry __verbose"),
    Flag(("--log-format",), "log_format", "text or json", str),
    Flag(("--log-level",), "log_level", "debug, info, warning, error or off", str),
)

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(GatewayOptions)}


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> GatewayOptions:
    """Reads a command line; a variable counts where its flag is not given.

    Raises:
        FlagError: an unknown flag, a bad value, or no service address.
    """
    values: dict[str, Any] = {}
    given = vars(_parser().parse_args(list(arguments)))
    for flag in FLAGS:
        text = environment.get(flag.variable, "").strip()
        if text and given.get(flag.variable) is None:
            values[flag.option] = _value(flag, text, from_variable=True)
    for flag in FLAGS:
        text = given.get(flag.variable)
        if text is not None:
            values[flag.option] = _value(flag, text, from_variable=False)
    if "service" not in values:
        raise FlagError("--service: the address of the service is required")
    try:
        return msgspec.convert(values, GatewayOptions, strict=True)
    except msgspec.ValidationError as error:
        raise FlagError(str(error)) from error


def help_text() -> str:
    """What `--help` prints."""
    return _parser().format_help()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def _parser() -> _Parser:
    parser = _Parser("kvarts-gateway", allow_abbrev=False, description=_SUMMARY)
    for flag in FLAGS:
        text = f"{flag.help}{_default_of(flag)} [{flag.variable}]".replace("%", "%%")
        if flag.convert is None:
            parser.add_argument(
                *flag.names, dest=flag.variable, action="store_const", const="on", help=text
            )
        else:
            parser.add_argument(*flag.names, dest=flag.variable, metavar="VALUE", help=text)
    return parser


def _default_of(flag: Flag) -> str:
    default = _DEFAULTS[flag.option]
    if flag.convert is None or default in (None, "", (), msgspec.NODEFAULT):
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    if isinstance(default, tuple):
        return f" (default: {','.join(cast('tuple[str, ...]', default))})"
    return f" (default: {default})"


def _value(flag: Flag, text: str, *, from_variable: bool) -> Any:
    name = flag.variable if from_variable else flag.names[-1]
    try:
        if flag.convert is not None:
            return flag.convert(text)
        return flag.present if _truth(text) else not flag.present
    except (ValueError, OSError) as error:
        raise FlagError(f"{name}: {text!r}: {error}") from error

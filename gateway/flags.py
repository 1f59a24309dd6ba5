"""The command line of `kvarts-gateway`: one table that fills `GatewayOptions`.

Flags are llama-server's where it has them. Each also reads `KVARTS_<NAME>`; the command line wins.
`kvarts-server` does not come through here: it hands over the finished options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn, cast

import msgspec

from gateway import flag_values as read
from gateway.options import GatewayOptions


class FlagError(ValueError):
    """A command line that cannot be understood."""


_MAX_SHOWN = 80
_SUMMARY = """A llama.cpp-compatible REST gateway in front of a Kvarts service, whose --service is required.
The command line wins over a variable."""


@dataclass(frozen=True)
class Flag:
    """One flag and the option it fills. Without `convert` it takes no value and means `present`.

    `convert` raises ValueError with what is allowed; the text of an `is_secret` flag is not shown.
    """

    names: tuple[str, ...]
    option: str
    help: str
    convert: Callable[[str], Any] | None = None
    present: bool = True
    is_secret: bool = False

    @property
    def variable(self) -> str:
        """The environment variable behind it."""
        return "KVARTS_" + self.names[-1].lstrip("-").replace("-", "_").upper()


FLAGS: tuple[Flag, ...] = (
    Flag(
        ("--service",),
        "service",
        "address of the service: HOST:PORT or unix:/PATH",
        read.service_address,
    ),
    Flag(
        ("--service-ca-file",),
        "service_ca_file",
        "PEM authorities of the service: use TLS",
        read.readable_file,
    ),
    Flag(
        ("--service-cert-file",),
        "service_cert_file",
        "PEM certificate shown to it",
        read.readable_file,
    ),
    Flag(
        ("--service-key-file",),
        "service_key_file",
        "PEM private key of that certificate",
        read.readable_file,
    ),
    Flag(
        ("--service-key",),
        "service_key",
        "API key for the gateway's own calls",
        read.service_key,
        is_secret=True,
    ),
    Flag(
        ("--host",), "hosts", "addresses, comma separated; NAME.sock is a Unix socket", read.hosts
    ),
    Flag(("--port",), "port", "TCP port; 0 lets the system choose", read.integer(0, read.MAX_PORT)),
    Flag(
        ("--api-key",),
        "api_keys",
        "keys that open the routes, comma separated",
        read.keys,
        is_secret=True,
    ),
    Flag(
        ("--api-key-file",),
        "api_key_file",
        "file with more keys, one a line; # starts a comment; read again when it changes",
        read.key_file,
    ),
    Flag(("--api-prefix",), "api_prefix", "path prefix of every route", read.prefix),
    Flag(("--path",), "static_path", "directory served below /", read.folder),
    Flag(("-to", "--timeout"), "timeout_s", "longest silence of a client, s", read.integer(1)),
    Flag(
        ("--shutdown-timeout",),
        "shutdown_timeout_s",
        "time to end after a signal, s",
        read.number(0, 86400),
    ),
    Flag(
        ("--sse-ping-interval",),
        "sse_ping_interval_s",
        "silence before a ping, s; 0 is never",
        read.integer(-1),
    ),
    Flag(("--cors-origins",), "cors_origins", "allowed origin, * or localhost", read.header),
    Flag(("--cors-methods",), "cors_methods", "allowed methods", read.header),
    Flag(("--cors-headers",), "cors_headers", "allowed headers", read.header),
    Flag(("--cors-credentials",), "cors_credentials", "on or off", read.truth),
    Flag(("--metrics",), "has_metrics", "serve /metrics"),
    Flag(("--props",), "has_props", "accept POST /props"),
    Flag(("--no-slots",), "has_slots", "do not serve GET /slots", present=False),
    Flag(("--no-ui",), "has_ui", "no page at /", present=False),
    Flag(
        ("--ui-mcp-proxy",),
        "has_cors_proxy",
        "fetch any address for whoever asks, at /cors-proxy",
    ),
    Flag(("--tools",), "has_tools", "which tools to serve at /tools: get_info or all", read.tools),
    Flag(
        ("--vertex-predict-path",),
        "vertex_predict_path",
        "POST route of Vertex AI's prediction protocol",
        read.prefix,
    ),
    Flag(
        ("--vertex-health-path",),
        "vertex_health_path",
        "where it asks for health",
        read.prefix,
    ),
    Flag(
        ("--ssl-cert-file",),
        "ssl_cert_file",
        "PEM certificate chain: speak HTTPS",
        read.readable_file,
    ),
    Flag(("--ssl-key-file",), "ssl_key_file", "PEM private key of that chain", read.readable_file),
    Flag(
        ("--ssl-client-ca-file",),
        "ssl_client_ca_file",
        "PEM authorities for clients",
        read.readable_file,
    ),
    Flag(("-a", "--alias"), "aliases", "names of the model, comma separated", read.items),
    Flag(("--tags",), "tags", "tags of the model, comma separated", read.items),
    Flag(
        ("-b", "--batch-size"),
        "batch_tokens",
        "tokens that the halves of an infill share",
        read.integer(1),
    ),
    Flag(("--spm-infill",), "spm_infill", "an infill has its suffix first"),
    Flag(("--no-jinja",), "use_jinja", "built-in chat formats only", present=False),
    Flag(
        ("--no-prefill-assistant",),
        "prefill_assistant",
        "close a last message of the assistant instead of continuing it",
        present=False,
    ),
    Flag(
        ("--chat-template-kwargs",),
        "chat_template_kwargs",
        "template variables, JSON",
        read.json_object,
    ),
    Flag(("-v", "--verbose"), "is_verbose", "answers carry __verbose"),
    Flag(
        ("--otlp-endpoint",),
        "otlp_endpoint",
        "OpenTelemetry collector, over OTLP/gRPC (extra: otel)",
        read.collector,
    ),
    Flag(
        ("--check-config",),
        "checks_only",
        "look at flags, keys, certificates and addresses, and serve nothing",
    ),
    Flag(("--log-format",), "log_format", "text or json", read.choice("text", "json")),
    Flag(
        ("--log-level",),
        "log_level",
        "debug, info, warning, error or off",
        read.choice("debug", "info", "warning", "error", "off"),
    ),
)

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(GatewayOptions)}


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> GatewayOptions:
    """Reads a command line; a variable counts where its flag is not given.

    Raises:
        FlagError: an unknown flag, a bad value, or no service address.
    """
    values: dict[str, Any] = {}
    namespace, others = _parser().parse_known_args(list(arguments))
    if others:
        raise FlagError(read.unknown(others[0], (name for flag in FLAGS for name in flag.names)))
    given = vars(namespace)
    for flag in FLAGS:
        text = environment.get(flag.variable)
        if text and given.get(flag.variable) is None:
            values[flag.option] = _value(flag, text.strip(), from_variable=True)
    for flag in FLAGS:
        text = given.get(flag.variable)
        if text is not None:
            values[flag.option] = _value(flag, text, from_variable=False)
    if "service" not in values:
        raise FlagError("--service: the address of the service is required")
    _check_together(values)
    if values.get("has_tools"):
        # They are for pages of this machine alone, unless somebody says otherwise.
        values.setdefault("cors_origins", "localhost")
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
    shown = f"%(prog)s {version('kvarts')}"
    parser.add_argument("--version", action="version", version=shown)
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
        return flag.present if read.truth(text) else not flag.present
    except ValueError as error:
        shown = "" if flag.is_secret else f" {text[:_MAX_SHOWN]!r}"
        raise FlagError(f"{name}{shown}: {error}") from error


def _check_together(values: Mapping[str, Any]) -> None:
    """Refuses files that would do nothing without another.

    Raises:
        FlagError: naming what is missing.
    """
    if ("service_cert_file" in values) != ("service_key_file" in values):
        raise FlagError("--service-cert-file and --service-key-file: each needs the other")
    if "service_cert_file" in values and "service_ca_file" not in values:
        raise FlagError("--service-cert-file: needs --service-ca-file")
    if ("ssl_cert_file" in values) != ("ssl_key_file" in values):
        raise FlagError("--ssl-cert-file and --ssl-key-file: each needs the other")
    if "ssl_client_ca_file" in values and "ssl_cert_file" not in values:
        raise FlagError("--ssl-client-ca-file: needs --ssl-cert-file and --ssl-key-file")

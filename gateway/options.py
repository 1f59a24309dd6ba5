"""What the gateway is told at its start: one frozen struct, and the two ways to fill it.

`kvarts-server` writes the struct as one JSON line on the gateway's stdin, so that keys never
show in a process list, and keeps the pipe open: its end tells the gateway to stop. `kvarts-gateway`
fills the same struct from its own command line (`gateway.flags`). Nothing here knows HTTP or gRPC.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_OPTIONS_BYTES = 1 << 20


class GatewayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that the gateway can be told, as llama-server's flags mean it.

    Attributes:
        service: gRPC address of the service, `host:port` or `unix:/path`.
        service_ca_file: PEM authorities that the service's certificate must come from; set, the
            channel uses TLS. None is a plain channel.
        service_cert_file: the gateway's own certificate, for a service that asks clients for one.
        service_key_file: the private key of that certificate.
        service_key: key for the gateway's own calls; a client's request carries the client's key.
        hosts: addresses to listen on; a name that ends in `.sock` is a Unix socket.
        port: TCP port of every address, 0 to let the system choose.
        api_keys: keys that open every route; none leaves all routes open.
        api_key_file: file with more of them, one a line, read again when it changes.
        api_prefix: path prefix of every route, starting with `/` and not ending in one, or "".
        static_path: directory served below `/` instead of the built-in page.
        timeout_s: longest silence of a client while it sends or fails to read.
        shutdown_timeout_s: how long running answers may take after the first signal.
        sse_ping_interval_s: silence before a comment line in an event stream; 0 or less: never.
        cors_origins: value of Access-Control-Allow-Origin, `*`, or `localhost`.
        cors_methods: value of Access-Control-Allow-Methods.
        cors_headers: value of Access-Control-Allow-Headers.
        cors_credentials: value of Access-Control-Allow-Credentials.
        has_metrics: serves GET /metrics.
        has_props: accepts POST /props.
        has_slots: serves GET /slots.
        has_ui: serves a page at `/`.
        has_cors_proxy: fetches any address for the page, at /cors-proxy.
        has_tools: tells a page of this machine, at /tools.
        vertex_predict_path: POST route of Vertex AI's prediction protocol, "" for none.
        vertex_health_path: where health is answered too then, "" for nowhere.
        ssl_cert_file: PEM certificate chain; set together with its key, the gateway speaks HTTPS.
        ssl_key_file: PEM private key of that chain.
        ssl_client_ca_file: PEM authorities for client certificates; set, clients must have one.
        aliases: names of the model; the first is shown. Empty: the service's own name for it.
        tags: shown in the model card, without effect.
        batch_tokens: llama-server's logical batch, which shares out the halves of an infill.
        spm_infill: an infill has its suffix first.
        use_jinja: chat goes through the model's template; False refuses tools.
        prefill_assistant: a last message of the assistant is continued instead of closed.
        chat_template_kwargs: default extra variables of the chat template.
        is_verbose: answers carry `__verbose` unless a request says otherwise.
        otlp_endpoint: where spans of requests are sent, `http(s)://HOST:PORT`; None makes none.
        checks_only: look at everything that was named and serve nothing.
        log_format: `text` or `json`.
        log_level: `debug`, `info`, `warning`, `error` or `off`.
    """

    service: str
    service_ca_file: str | None = None
    service_cert_file: str | None = None
    service_key_file: str | None = None
    service_key: str | None = None
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    api_prefix: str = ""
    static_path: str | None = None
    timeout_s: int = 3600
    shutdown_timeout_s: float = 2.0
    sse_ping_interval_s: int = 30
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    has_metrics: bool = False
    has_props: bool = False
    has_slots: bool = True
    has_ui: bool = True
    has_cors_proxy: bool = False
    has_tools: bool = False
    vertex_predict_path: str = ""
    vertex_health_path: str = ""
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None
    ssl_client_ca_file: str | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    batch_tokens: int = 2048
    spm_infill: bool = False
    use_jinja: bool = True
    prefill_assistant: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    is_verbose: bool = False
    otlp_endpoint: str | None = None
    checks_only: bool = False
    log_format: str = "text"
    log_level: str = "info"


def encode_options(options: GatewayOptions) -> bytes:
    """Writes the one line that `decode_options` reads."""
    return msgspec.json.encode(options) + b"\n"


def decode_options(line: bytes) -> GatewayOptions:
    """Reads the line that the launcher writes.

    Raises:
        ValueError: the line is no such struct, or is longer than `MAX_OPTIONS_BYTES`.
    """
    if len(line) > MAX_OPTIONS_BYTES:
        raise ValueError(f"the options are {len(line)} bytes, the limit is {MAX_OPTIONS_BYTES}")
    return msgspec.json.decode(line, type=GatewayOptions)

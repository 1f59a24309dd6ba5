"""What the service is told at its start: frozen values, built from a parsed command line.

Checks here are those that need two flags, a file, or the default of a folder; single values were
checked by the table. The gateway's half leaves as plain JSON, because the service must not import
the gateway; `gateway.options.GatewayOptions` is what reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from engine.errors import EngineError
from engine.requests import Mirostat, Pooling, SamplingParams
from engine.text.grammar.schema_gbnf import schema_to_gbnf
from engine.types import EngineConfig
from service.access_options import api_keys, key_file, tls_files
from service.adapter_options import adapter_dir, with_adapters
from service.defaults import GenerationDefaults, ReasoningDefaults
from service.engine_options import embeds, engine_config
from service.flag_values import BadValue, unescape
from service.flags import FlagError, Parsed
from service.json_text import parse_json
from service.key_file import KeyFile
from service.template import try_template
from service.tls_files import TlsFiles

SERVICE_PORT = 50051
_VERBOSE = 10
_VERTEX_MODE = "PREDICTION"
_MAX_TEXT_BYTES = 1 << 20
_MAX_SHOWN = 80
_MAX_MESSAGE_BYTES = 4096

_SAMPLING_FIELDS = frozenset(entry.name for entry in fields(SamplingParams))


@dataclass(frozen=True)
class ModelSource:
    """Where the model comes from; neither path nor repository is the default model.

    `cache_dir` holds what Kvarts fetches itself, `hub_dir` is the Hugging Face cache.
    """

    path: str | None
    hf_repo: str | None
    hf_file: str | None
    is_offline: bool
    cache_dir: Path
    hub_dir: Path
    hf_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class EmbeddingOptions:
    """How vectors are made; `pooling` None is the model's own way."""

    pooling: Pooling | None
    norm: int


@dataclass(frozen=True)
class ServiceOptions:
    """Everything that the service process can be told.

    Attributes:
        model: where the model comes from.
        engine: the layout; `context_tokens` 0 is the model's training context.
        defaults: what a request gets where it is silent.
        sampling_given: the fields of `defaults.sampling` that somebody set; for the others the
            model file's own preferences come first.
        aliases: names of the model, the first is shown; empty is the file's own name.
        tags: shown with the model.
        embedding: vectors are served, pooled so unless a request says otherwise; None serves none.
            Its pooling None is the model's own.
        grpc_host: address of the public door.
        grpc_port: its port, 0 for a free one; None keeps it closed.
        private_socket: Unix socket that the own gateway uses, beside the public door.
        metrics_port: port of Prometheus metrics on `grpc_host`, 0 for a free one; None serves none.
        has_vllm_metrics: what routers read of a vLLM server is served under its names too.
        otlp_endpoint: where spans of calls are sent, `http(s)://HOST:PORT`; None makes none.
        api_keys: any of them opens the service; empty leaves it open.
        key_file: where those keys are read again when it changes; None: only at the start.
        own_key: opens the service to its own gateway; None where there is none.
        admin_key: alone opens what changes slots, adapters and pools, if set.
        tls: certificate of the public door; None is plain text.
        shutdown_timeout_s: grace of running requests after the first signal.
        tells_idle_slots: what idle slots keep cached is logged at level debug.
        slot_save_path: existing folder for slot files; None keeps them off.
        slot_save_limit_bytes: what all of them may take together; None is no limit.
        slot_autosave: slots are saved there at a stop and restored after a start.
        adapter_dir: existing folder of adapters that may be loaded later; None loads none.
        model_dir: existing folder of models that may be served later; None serves the one alone.
        pre_override: pre-tokenizer instead of the file's.
        chat_template: Jinja source, or a built-in format's name, instead of the file's template.
        use_jinja: templates are run; else built-in formats only.
        checks_only: look at everything that was named and serve nothing.
        log_format: `text` or `json`.
        log_level: `debug`, `info`, `warning`, `error` or `off`.
        log_file: also log there.
    """

    model: ModelSource
    engine: EngineConfig
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    sampling_given: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    embedding: EmbeddingOptions | None = None
    grpc_host: str = "127.0.0.1"
    grpc_port: int | None = None
    private_socket: str | None = None
    metrics_port: int | None = None
    has_vllm_metrics: bool = False
    otlp_endpoint: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_file: KeyFile | None = None
    own_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    shutdown_timeout_s: float = 2.0
    tells_idle_slots: bool = False
    slot_save_path: str | None = None
    slot_save_limit_bytes: int | None = None
    slot_autosave: bool = False
    adapter_dir: str | None = None
    model_dir: str | None = None
    pre_override: str | None = None
    chat_template: str | None = None
    use_jinja: bool = True
    checks_only: bool = False
    log_format: str = "text"
    log_level: str = "info"
    log_file: str | None = None


def service_options(parsed: Parsed) -> ServiceOptions:
    """Builds the service's half.

    Raises:
        FlagError: flags contradict each other, or a file that one names cannot be used.
    """
    cache_dir = _cache_dir(parsed)
    sampling = _sampling(parsed)
    engine = with_adapters(engine_config(parsed, cache_dir), parsed)
    return ServiceOptions(
        model=_model_source(parsed, cache_dir),
        tells_idle_slots=parsed["tells_idle_slots"] and engine.host_cache_bytes != 0,
        engine=engine,
        defaults=_generation_defaults(parsed, sampling),
        sampling_given=frozenset(sampling),
        aliases=parsed["aliases"],
        tags=parsed["tags"],
        embedding=_embedding(parsed),
        grpc_host=parsed["grpc_host"],
        grpc_port=parsed["grpc_port"],
        metrics_port=parsed["metrics_port"],
        has_vllm_metrics=parsed["has_vllm_metrics"],
        otlp_endpoint=_otlp_endpoint(parsed),
        api_keys=api_keys(parsed),
        key_file=key_file(parsed),
        admin_key=parsed["admin_key"],
        tls=tls_files(parsed),
        shutdown_timeout_s=parsed["shutdown_timeout_s"],
        slot_save_path=_slot_save_path(parsed),
        slot_save_limit_bytes=_slot_save_limit(parsed),
        slot_autosave=_slot_autosave(parsed),
        adapter_dir=adapter_dir(parsed),
        model_dir=_model_dir(parsed),
        pre_override=parsed["pre_override"],
        chat_template=_chat_template(parsed),
        use_jinja=parsed["use_jinja"],
        checks_only=parsed["checks_only"],
        log_format=_log_format(parsed),
        log_level=_log_level(parsed),
        log_file=_log_file(parsed),
    )


def gateway_options(parsed: Parsed, service: str, own_key: str) -> bytes:
    """Builds the line of JSON that the gateway reads.

    Args:
        parsed: the command line.
        service: the address to call.
        own_key: for the gateway's own calls.

    Raises:
        FlagError: flags contradict each other, or a file that one names cannot be used.
    """
    keys, file = api_keys(parsed), key_file(parsed)
    admin_key = parsed["admin_key"]
    tls = tls_files(parsed)
    named = file.beside if file else keys
    prefix = cast("str", parsed["api_prefix"]).rstrip("/")
    if prefix and not prefix.startswith("/"):
        raise FlagError(f"--api-prefix {prefix!r}: must start with /")
    hosts = parsed["hosts"]
    if not hosts:
        raise FlagError("--host: needs at least one address")
    is_vertex = parsed["aip_mode"] == _VERTEX_MODE
    document: dict[str, Any] = {
        "service": service,
        "service_key": own_key,
        "hosts": hosts,
        "port": parsed["aip_http_port"] if is_vertex else parsed["port"],
        "api_keys": (*named, admin_key) if keys and admin_key else named,
        "api_key_file": file.path if file else None,
        "api_prefix": prefix,
        "static_path": parsed["static_path"],
        "timeout_s": parsed["timeout_s"],
        "shutdown_timeout_s": parsed["shutdown_timeout_s"],
        "sse_ping_interval_s": parsed["sse_ping_interval_s"],
        "cors_origins": _cors_origins(parsed),
        "cors_methods": parsed["cors_methods"],
        "cors_headers": parsed["cors_headers"],
        "cors_credentials": parsed["cors_credentials"],
        "has_metrics": parsed["has_metrics"],
        "has_props": parsed["has_props"],
        "has_slots": parsed["has_slots"],
        "has_ui": parsed["has_ui"],
        "has_cors_proxy": parsed["has_cors_proxy"],
        "has_tools": bool(parsed["tools"]),
        "vertex_predict_path": parsed["aip_predict_route"] if is_vertex else "",
        "vertex_health_path": (parsed["aip_health_route"] or "") if is_vertex else "",
        "ssl_cert_file": tls.cert_file if tls else None,
        "ssl_key_file": tls.key_file if tls else None,
        "ssl_client_ca_file": tls.client_ca_file if tls else None,
        "aliases": parsed["aliases"],
        "tags": parsed["tags"],
        "batch_tokens": parsed["batch_tokens"],
        "spm_infill": parsed["spm_infill"],
        "use_jinja": parsed["use_jinja"],
        "prefill_assistant": parsed["prefill_assistant"],
        "chat_template_kwargs": _template_kwargs(parsed),
        "is_verbose": _is_verbose(parsed),
        "otlp_endpoint": _otlp_endpoint(parsed),
        "log_format": _log_format(parsed),
        "log_level": _log_level(parsed),
    }
    return json.dumps(document).encode() + b"\n"


def config_file_paths(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where llama.cpp's `config.ini` may lie, weakest first."""
    home = environ.get("XDG_CONFIG_HOME", "").strip()
    user = Path(home) if home else Path.home() / ".config"
    return Path("/etc/llama.cpp/config.ini"), user / "llama.cpp" / "config.ini"


def _cors_origins(parsed: Parsed) -> str:
    """What pages of other origins may read; tools of this machine are for its own alone."""
    if parsed["cors_origins"] is not None:
        return parsed["cors_origins"]
    return "localhost" if parsed["tools"] else "*"


def _cache_dir(parsed: Parsed) -> Path:
    if parsed["cache_dir"]:
        return Path(parsed["cache_dir"]).expanduser()
    home = parsed["xdg_cache_home"]
    return (Path(home) if home else Path.home() / ".cache") / "kvarts"


def _hub_dir(parsed: Parsed) -> Path:
    for dest in ("llama_cache", "hf_hub_cache", "huggingface_hub_cache"):
        if parsed[dest]:
            return Path(parsed[dest]).expanduser()
    if parsed["hf_home"]:
        return Path(parsed["hf_home"]).expanduser() / "hub"
    home = parsed["xdg_cache_home"]
    return (Path(home) if home else Path.home() / ".cache") / "huggingface" / "hub"


def _model_source(parsed: Parsed, cache_dir: Path) -> ModelSource:
    if parsed["hf_file"] and not parsed["hf_repo"]:
        raise FlagError("--hf-file: needs --hf-repo, the repository that the file is in")
    return ModelSource(
        path=parsed["model"],
        hf_repo=parsed["hf_repo"],
        hf_file=parsed["hf_file"],
        is_offline=parsed["offline"],
        cache_dir=cache_dir,
        hub_dir=_hub_dir(parsed),
        hf_token=parsed["hf_token"],
    )


def _embedding(parsed: Parsed) -> EmbeddingOptions | None:
    if not embeds(parsed):
        return None
    pooling = "rank" if parsed["reranks"] else parsed["pooling"]
    return EmbeddingOptions(None if pooling is None else Pooling(pooling), parsed["embd_norm"])


def _sampling(parsed: Parsed) -> dict[str, Any]:
    """The sampling fields that somebody set."""
    sampling = {name: parsed[name] for name in parsed.given.intersection(_SAMPLING_FIELDS)}
    if "top_k" in sampling:
        sampling["top_k"] = max(sampling["top_k"], 0)
    if "mirostat" in sampling:
        sampling["mirostat"] = Mirostat(sampling["mirostat"])
    if sampling.get("dry_base", 1) < 1:
        del sampling["dry_base"]
    if "dry_sequence_breakers" in sampling:
        breakers = [b for b in sampling["dry_sequence_breakers"] if b != "none"]
        sampling["dry_sequence_breakers"] = _unescaped(parsed, breakers, "--dry-sequence-breaker")
    return sampling


def _generation_defaults(parsed: Parsed, sampling: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        sampling=SamplingParams(**sampling),
        max_tokens=None if parsed["max_tokens"] == -1 else parsed["max_tokens"],
        stop=_unescaped(parsed, parsed["stop"], "--reverse-prompt"),
        ignore_eos=bool(parsed["ignore_eos"]),
        cache_prompt=parsed["cache_prompt"],
        n_keep=parsed["n_keep"],
        n_cache_reuse=parsed["n_cache_reuse"],
        render_special=parsed["render_special"],
        prefill_assistant=parsed["prefill_assistant"],
        template_kwargs=_template_kwargs(parsed),
        grammar=_grammar(parsed),
        reasoning=_reasoning(parsed),
        parses_chat=not parsed["skips_chat_parsing"],
    )


def _reasoning(parsed: Parsed) -> ReasoningDefaults:
    message = cast("str", parsed["reasoning_budget_message"])
    if len(message.encode()) > _MAX_MESSAGE_BYTES:
        raise FlagError(f"--reasoning-budget-message: more than {_MAX_MESSAGE_BYTES} bytes")
    return ReasoningDefaults(parsed["reasoning_format"], parsed["reasoning_budget"], message)


_GRAMMAR_FLAGS = ("grammar", "grammar_file", "json_schema", "json_schema_file")


def _grammar(parsed: Parsed) -> str:
    """The grammar of requests that name none; whether it compiles is the loader's to say."""
    given = [name for name in _GRAMMAR_FLAGS if parsed[name]]
    if not given:
        return ""
    flag = f"--{given[0].replace('_', '-')}"
    if len(given) > 1:
        raise FlagError(f"{flag} and --{given[1].replace('_', '-')}: only one can be given")
    text = parsed[given[0]]
    if given[0].endswith("file"):
        text = _read_text(text, flag)
    if given[0].startswith("grammar"):
        return text
    try:
        return schema_to_gbnf(parse_json(text, "schema")).grammar
    except EngineError as error:
        raise FlagError(f"{flag} {_shortened(text)!r}: {error}") from None


def _template_kwargs(parsed: Parsed) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"preserve_reasoning": parsed["preserve_reasoning"]}
    if parsed["thinks"] is not None:
        kwargs["enable_thinking"] = parsed["thinks"]
    if parsed["reasoning_effort"] != "default":
        kwargs["reasoning_effort"] = parsed["reasoning_effort"]
    return kwargs | parsed["chat_template_kwargs"]


def _unescaped(parsed: Parsed, texts: list[str] | tuple[str, ...], flag: str) -> tuple[str, ...]:
    if not parsed["escapes"]:
        return tuple(texts)
    try:
        return tuple(unescape(text) for text in texts)
    except BadValue as bad:
        raise FlagError(f"{flag}: {bad}") from None


def _otlp_endpoint(parsed: Parsed) -> str | None:
    endpoint = parsed["otlp_endpoint"]
    if endpoint is not None and find_spec("opentelemetry") is None:
        raise FlagError("--otlp-endpoint: needs the extra otel: pip install 'kvarts[otel]'")
    return endpoint


def _slot_save_path(parsed: Parsed) -> str | None:
    name = parsed["slot_save_path"]
    if name is not None and not Path(name).is_dir():
        raise FlagError(f"--slot-save-path {name}: is not a folder")
    return name


def _model_dir(parsed: Parsed) -> str | None:
    name = parsed["model_dir"]
    if name is not None and not Path(name).is_dir():
        raise FlagError(f"--model-dir {name}: is not a folder")
    return name


def _slot_save_limit(parsed: Parsed) -> int | None:
    mib: int = parsed["slot_save_limit_mib"]
    if mib and parsed["slot_save_path"] is None:
        raise FlagError("--slot-save-limit: needs --slot-save-path")
    return mib << 20 or None


def _slot_autosave(parsed: Parsed) -> bool:
    if parsed["slot_autosave"] and parsed["slot_save_path"] is None:
        raise FlagError("--slot-autosave: needs --slot-save-path")
    return parsed["slot_autosave"]


def _chat_template(parsed: Parsed) -> str | None:
    flag, text = "--chat-template", parsed["chat_template"]
    if parsed["chat_template_file"]:
        flag = "--chat-template-file"
        text = _read_text(parsed["chat_template_file"], flag)
    if text:
        try:
            try_template(text, use_jinja=parsed["use_jinja"])
        except EngineError as error:
            raise FlagError(f"{flag} {_shortened(text)!r}: {error}") from None
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _read_text(name: str, flag: str) -> str:
    try:
        with open(name, "rb") as file:
            raw = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise FlagError(f"{flag} {name}: {error.strerror}") from None
    if len(raw) > _MAX_TEXT_BYTES:
        raise FlagError(f"{flag} {name}: is larger than {_MAX_TEXT_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FlagError(f"{flag} {name}: is not UTF-8") from None


def _is_verbose(parsed: Parsed) -> bool:
    return parsed["is_verbose"] or parsed["verbosity"] >= _VERBOSE


def _log_format(parsed: Parsed) -> str:
    return "json" if parsed["log_jsonl"] else parsed["log_format"]


def _log_file(parsed: Parsed) -> str | None:
    name = parsed["log_file"]
    if name is None:
        return None
    try:
        with open(name, "ab"):
            return name
    except OSError as error:
        raise FlagError(f"--log-file {name}: {error.strerror}") from None


def _log_level(parsed: Parsed) -> str:
    if parsed["log_disabled"]:
        return "off"
    if _is_verbose(parsed):
        return "debug"
    levels = {0: "error", 1: "error", 2: "warning", 3: "info"}
    return levels.get(parsed["verbosity"], "debug")

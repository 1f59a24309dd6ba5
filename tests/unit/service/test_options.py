from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvarts.v1.generation_pb2 import GenerateRequest

from engine.requests import Mirostat, Pooling, Sampler, SamplingParams
from gateway.options import GatewayOptions, decode_options
from service.convert import from_sampling
from service.defaults import ReasoningDefaults
from service.flag_table import FLAGS
from service.flag_table.sampling import SAMPLING
from service.flags import FlagError, parse
from service.options import ServiceOptions, config_file_paths, gateway_options, service_options
from service.validate import Limits, check_generate
from tests.certificates import Certificates, needs_openssl


def _service(*words: str, **environ: str) -> ServiceOptions:
    return service_options(parse(words, environ, FLAGS))


def _gateway(*words: str, **environ: str) -> GatewayOptions:
    return decode_options(gateway_options(parse(words, environ, FLAGS), "unix:/s", "own"))


def test_silence_is_the_peers_defaults() -> None:
    options = _service()
    assert options.defaults.sampling == SamplingParams()
    assert options.sampling_given == frozenset()
    assert options.defaults.max_tokens is None
    assert (options.engine.num_slots, options.engine.unified) == (4, True)
    assert options.engine.context_tokens == 0
    assert options.engine.chunk_tokens == 512
    assert options.engine.kv_dtype == "f16"
    assert options.grpc_port is None


def test_silence_is_the_gateways_own_defaults() -> None:
    expected = GatewayOptions(
        service="unix:/s", service_key="own", chat_template_kwargs={"preserve_reasoning": True}
    )
    assert _gateway() == expected


@pytest.mark.parametrize(
    ("words", "has_tools", "origins"),
    [
        (["--tools", "all"], True, "localhost"),
        (["--tools", "get_info", "--cors-origins", "*"], True, "*"),
        (["--cors-origins", ""], False, ""),
    ],
)
def test_tools_are_for_pages_of_this_machine(
    words: list[str], has_tools: bool, origins: str
) -> None:
    options = _gateway(*words)
    assert (options.has_tools, options.cors_origins) == (has_tools, origins)


def test_slots_by_number_split_the_context() -> None:
    assert _service("-np", "2").engine.unified is False
    assert _service("-np", "2", "-kvu").engine.unified is True
    assert _service("-no-kvu").engine.unified is False


@pytest.mark.parametrize(
    ("words", "chunk"), [(["-b", "32"], 32), (["-ub", "64"], 64), (["-b", "9", "-ub", "7"], 7)]
)
def test_the_smaller_batch_bounds_a_chunk(words: list[str], chunk: int) -> None:
    assert _service(*words).engine.chunk_tokens == chunk


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ([], 8192 << 20),
        (["-cram", "100"], 100 << 20),
        (["--cache-ram", "0"], 0),
        (["-cram", "-1"], None),
        (["--memory-budget", "900"], 0),
        (["--memory-budget", "900", "-cram", "100"], 100 << 20),
    ],
)
def test_the_host_cache_is_bounded_in_mebibytes(words: list[str], limit: int | None) -> None:
    assert _service(*words).engine.host_cache_bytes == limit


def test_a_host_cache_without_a_limit_has_no_place_in_a_budget() -> None:
    with pytest.raises(FlagError, match="--cache-ram -1 is no limit"):
        _service("--memory-budget", "900", "-cram", "-1")


def test_keys_and_values_have_one_type() -> None:
    assert _service("-ctk", "f32", "-ctv", "f32").engine.kv_dtype == "f32"
    with pytest.raises(FlagError, match="-ctk f32 and -ctv f16"):
        _service("-ctk", "f32")


@pytest.mark.parametrize(
    "flag",
    [flag.names[-1] for flag in SAMPLING if flag.kind.metavar in ("X", "N")],
)
@pytest.mark.parametrize("value", ["-1e39", "-2", "-1", "0", "0.5", "1", "2", "1e39"])
def test_every_default_that_is_taken_is_one_that_a_request_may_have(flag: str, value: str) -> None:
    try:
        options = _service(flag, value)
    except FlagError:
        return
    sampling = from_sampling(options.defaults.sampling)
    check_generate(GenerateRequest(text="x", sampling=sampling), Limits(1, 100, 64))


def test_a_chain_in_letters_was_given_too() -> None:
    options = _service("--sampling-seq", "kt")
    assert options.defaults.sampling.samplers == (Sampler.TOP_K, Sampler.TEMPERATURE)
    assert options.sampling_given == {"samplers"}


def test_sampling_says_what_was_given() -> None:
    options = _service("--temp", "-3", "--top-k", "-1", "--mirostat", "2", "--ignore-eos")
    sampling = options.defaults.sampling
    assert (sampling.temperature, sampling.top_k, sampling.mirostat) == (0, 0, Mirostat.V2)
    assert options.defaults.ignore_eos
    assert options.sampling_given == {"temperature", "top_k", "mirostat"}


def test_a_dry_base_below_one_is_ignored_as_the_peer_does() -> None:
    assert _service("--dry-base", "0.5").defaults.sampling.dry_base == 1.75


def test_dry_breakers_replace_the_usual_ones() -> None:
    given = _service("--dry-sequence-breaker", r"\n", "--dry-sequence-breaker", "x")
    assert given.defaults.sampling.dry_sequence_breakers == ("\n", "x")
    none = _service("--dry-sequence-breaker", "none")
    assert none.defaults.sampling.dry_sequence_breakers == ()


def test_stop_strings_are_unescaped_unless_told() -> None:
    assert _service("-r", r"\n", "-r", "b").defaults.stop == ("\n", "b")
    assert _service("-r", r"\n", "--no-escape").defaults.stop == (r"\n",)
    with pytest.raises(FlagError, match="--reverse-prompt: must be UTF-8"):
        _service("-r", r"\xff")


def test_keys_come_from_flags_and_file_once_each(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# note\n\nfrom-file\nb\n")
    words = ["--api-key", "a,b", "--api-key-file", str(file)]
    assert _service(*words).api_keys == ("a", "b", "from-file")
    gateway = _gateway(*words, "--admin-key", "root")
    # The gateway reads the file itself, when it changes too.
    assert (gateway.api_keys, gateway.api_key_file) == (("a", "b", "root"), str(file))
    assert gateway.service_key == "own"


def test_an_admin_key_alone_leaves_the_gateway_open() -> None:
    gateway = _gateway("--admin-key", "root")
    assert gateway.api_keys == ()


def test_a_key_file_must_hold_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nothing\n")
    with pytest.raises(FlagError, match="holds no key"):
        _service("--api-key-file", str(file))
    with pytest.raises(FlagError, match="No such file"):
        _service("--api-key-file", str(tmp_path / "none"))


@pytest.mark.parametrize("empty", ["", " ", ","])
def test_a_key_flag_must_hold_a_key(empty: str) -> None:
    with pytest.raises(FlagError, match="--api-key: holds no key"):
        _service("--api-key", empty)


def test_secrets_do_not_show_in_a_printed_options() -> None:
    text = repr(_service("--api-key", "s3cret", "--admin-key", "adm1n", "-hft", "t0ken"))
    assert not any(secret in text for secret in ("s3cret", "adm1n", "t0ken"))


def test_certificate_and_key_need_each_other(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.write_text("x")
    with pytest.raises(FlagError, match="each needs the other"):
        _service("--ssl-key-file", str(pem))
    with pytest.raises(FlagError, match="--ssl-client-ca-file: needs"):
        _service("--ssl-client-ca-file", str(pem))


@needs_openssl
def test_a_pair_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    ours = Certificates(tmp_path, "ours")
    files, other = ours.files("server"), ours.files("other")
    words = ("--ssl-cert-file", files.cert_file, "--ssl-key-file")
    assert _service(*words, files.key_file).tls == files
    assert _gateway(*words, files.key_file).ssl_cert_file == files.cert_file
    with pytest.raises(FlagError, match=r"--ssl-cert-file, --ssl-key-file: .*mismatch"):
        _service(*words, other.key_file)
    with pytest.raises(FlagError, match=r"nope\.pem: No such file"):
        _service(*words, str(tmp_path / "nope.pem"))
    with pytest.raises(FlagError, match=r"client-ca-file: .*server\.key"):
        _service(*words, files.key_file, "--ssl-client-ca-file", files.key_file)


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert _service("--chat-template-file", str(file)).chat_template == "{{ messages }}"
    file.write_bytes(b"\xff")
    with pytest.raises(FlagError, match="is not UTF-8"):
        _service("--chat-template-file", str(file))


def test_a_template_is_tried_before_a_model_is_loaded(tmp_path: Path) -> None:
    free = ("--chat-template", "no template " * 20)
    assert _service(*free).chat_template == free[1]
    with pytest.raises(FlagError, match=r"--chat-template 'no te.{75}\.\.\.': .*without --jinja"):
        _service(*free, "--no-jinja")
    named = _service("--chat-template", "llama3", "--no-jinja")
    assert (named.chat_template, named.use_jinja) == ("llama3", False)
    file = tmp_path / "t.jinja"
    file.write_text("{% if %}")
    with pytest.raises(FlagError, match=r"--chat-template-file '{% if %}': chat template: "):
        _service("--chat-template-file", str(file))


def test_reasoning_flags() -> None:
    words = ["--reasoning-format", "none", "--reasoning-budget", "7", "--skip-chat-parsing"]
    defaults = _service(*words, "--reasoning-budget-message", "Enough.").defaults
    assert defaults.reasoning == ReasoningDefaults("none", 7, "Enough.")
    assert not defaults.parses_chat
    plain = _service().defaults
    assert (plain.reasoning, plain.parses_chat) == (ReasoningDefaults(), True)
    with pytest.raises(FlagError, match="--reasoning-budget-message: more than 4096 bytes"):
        _service("--reasoning-budget-message", "x" * 4097)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--reasoning on --reasoning-effort high",
            {"enable_thinking": True, "reasoning_effort": "high"},
        ),
        ("-rea 0 --reasoning-effort default", {"enable_thinking": False}),
        ("-rea auto", {}),
        ('-rea on --chat-template-kwargs {"enable_thinking":false}', {"enable_thinking": False}),
    ],
)
def test_thinking_is_a_template_variable(words: str, expected: dict[str, Any]) -> None:
    kwargs = _gateway(*words.split()).chat_template_kwargs
    assert kwargs == {"preserve_reasoning": True} | expected


def test_template_variables_reach_both_halves() -> None:
    words = ["--chat-template-kwargs", '{"a": 1}', "--no-reasoning-preserve"]
    expected = {"a": 1, "preserve_reasoning": False}
    assert _service(*words).defaults.template_kwargs == expected
    assert _gateway(*words).chat_template_kwargs == expected


def test_api_prefix_is_a_path() -> None:
    assert _gateway("--api-prefix", "/x/").api_prefix == "/x"
    with pytest.raises(FlagError, match="must start with /"):
        _gateway("--api-prefix", "x")


def test_hosts_are_a_list_and_not_empty() -> None:
    assert _gateway("--host", "127.0.0.1, ::1,/run/a.sock").hosts == (
        "127.0.0.1",
        "::1",
        "/run/a.sock",
    )
    with pytest.raises(FlagError, match="at least one address"):
        _gateway("--host", ",")


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ([], "info"),
        (["-v"], "debug"),
        (["-lv", "2"], "warning"),
        (["-lv", "5"], "debug"),
        (["--log-disable", "-v"], "off"),
    ],
)
def test_log_levels(words: list[str], level: str) -> None:
    assert _service(*words).log_level == level


def test_verbose_answers_need_more_than_verbose_logs() -> None:
    assert _gateway("-lv", "5").is_verbose is False
    assert _gateway("-lv", "10").is_verbose is True


def test_a_log_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert _service("--log-file", str(tmp_path / "log")).log_file == str(tmp_path / "log")
    with pytest.raises(FlagError, match=r"--log-file .*: No such file or directory"):
        _service("--log-file", str(tmp_path / "none" / "log"))


def test_json_logs_by_either_flag() -> None:
    assert _service("--log-jsonl").log_format == "json"
    assert _service("--log-format", "json").log_format == "json"


def test_caches_follow_the_variables_in_the_peers_order() -> None:
    assert _service(LLAMA_CACHE="/a", HF_HUB_CACHE="/b").model.hub_dir == Path("/a")
    assert _service(HF_HUB_CACHE="/b", HF_HOME="/c").model.hub_dir == Path("/b")
    assert _service(HF_HOME="/c", XDG_CACHE_HOME="/d").model.hub_dir == Path("/c/hub")
    last = _service(XDG_CACHE_HOME="/d").model
    assert (last.hub_dir, last.cache_dir) == (Path("/d/huggingface/hub"), Path("/d/kvarts"))
    assert _service("--cache-dir", "/e").engine.compile_cache == "/e/xla"


def test_the_compile_cache_can_be_off() -> None:
    assert _service("--compile-cache", "off").engine.compile_cache is None


def test_a_file_of_a_repository_needs_the_repository() -> None:
    with pytest.raises(FlagError, match="--hf-file: needs --hf-repo"):
        _service("--hf-file", "a.gguf")


def test_the_folder_of_slot_files_must_exist(tmp_path: Path) -> None:
    assert _service().slot_save_path is None
    assert _service("--slot-save-path", str(tmp_path)).slot_save_path == str(tmp_path)
    for name in (tmp_path / "none", Path(__file__)):
        with pytest.raises(FlagError, match=f"--slot-save-path {name}: is not a folder"):
            _service("--slot-save-path", str(name))


def test_slot_files_may_have_a_limit(tmp_path: Path) -> None:
    folder = ("--slot-save-path", str(tmp_path))
    assert _service(*folder).slot_save_limit_bytes is None
    assert _service(*folder, "--slot-save-limit", "3").slot_save_limit_bytes == 3 << 20
    with pytest.raises(FlagError, match="--slot-save-limit: needs --slot-save-path"):
        _service("--slot-save-limit", "3")


def test_slots_are_kept_over_a_restart_only_where_there_is_a_folder(tmp_path: Path) -> None:
    assert not _service("--slot-save-path", str(tmp_path)).slot_autosave
    assert _service("--slot-save-path", str(tmp_path), "--slot-autosave").slot_autosave
    with pytest.raises(FlagError, match="--slot-autosave: needs --slot-save-path"):
        _service("--slot-autosave")


def test_config_files_are_the_systems_then_the_users() -> None:
    paths = config_file_paths({"XDG_CONFIG_HOME": "/u"})
    assert paths == (Path("/etc/llama.cpp/config.ini"), Path("/u/llama.cpp/config.ini"))


def test_vertex_counts_where_it_is_asked_for() -> None:
    environ = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "9001", "AIP_HEALTH_ROUTE": "alive"}
    gateway = _gateway("--port", "80", **environ)
    assert (gateway.port, gateway.vertex_predict_path) == (9001, "/predict")
    assert gateway.vertex_health_path == "/alive"
    off = _gateway("--port", "80", **(environ | {"AIP_MODE": "other"}))
    assert (off.port, off.vertex_predict_path, off.vertex_health_path) == (80, "", "")


def test_a_limit_of_slots_makes_room_for_itself() -> None:
    engine = _service("--kv-unified-per-slot", "512", "-np", "3").engine
    assert (engine.slot_tokens, engine.context_tokens) == (512, 1536)
    given = _service("--kv-unified-per-slot", "512", "-c", "0").engine
    assert given.context_tokens == 0


def test_sleep_is_off_unless_asked_for() -> None:
    assert _service().engine.sleep_idle_s is None
    assert _service("--sleep-idle-seconds", "60").engine.sleep_idle_s == 60
    with pytest.raises(FlagError, match="but not 0"):
        _service("--sleep-idle-seconds", "0")


def test_reranking_is_embedding_with_rank_pooling() -> None:
    options = _service("--reranking")
    assert options.engine.embeds
    assert options.embedding is not None
    assert options.embedding.pooling is Pooling.RANK
    assert _service("--pooling", "rank").embedding is None

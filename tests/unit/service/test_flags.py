from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.flag_help import render_help
from service.flag_table import FLAGS
from service.flags import Flag, FlagError, Scope, Verdict, parse

# One acceptable text per value shape, by the metavar that help shows.
_SAMPLES = {
    "PATH": "/some/path",
    "N": "1",
    "X": "0.5",
    "FILE": "file",
    "DIR": "folder",
    "TEXT": "text",
    "A,B": "a,b",
    "ADDRESS,...": "127.0.0.1",
    "KEY,...": "key",
    "JSON": '{"a": 1}',
    "A;B": "top_k;temperature",
    "LETTERS": "kt",
    "ID+BIAS": "15+1.5",
    "URL": "http://127.0.0.1:4317",
    "FNAME,...": "a.gguf,b.gguf",
    "FNAME:SCALE,...": "a.gguf:0.5",
}


def _sample(flag: Flag) -> str:
    metavar = flag.kind.metavar
    if flag.dest in ("kv_pages", "queue_bytes"):
        return str(1 << 20)
    if metavar.startswith("{"):
        return metavar[1:-1].split(",")[0]
    return _SAMPLES[metavar]


def _words(flag: Flag, name: str) -> list[str]:
    return [name, _sample(flag)] if flag.kind.takes_value else [name]


def _spellings(verdict: Verdict) -> list[Any]:
    return [
        pytest.param(flag, name, id=name)
        for flag in FLAGS
        if flag.verdict is verdict
        for name in flag.names
    ]


def test_no_spelling_stands_for_two_flags() -> None:
    names = [name for flag in FLAGS for name in (*flag.names, *flag.off_names)]
    assert len(names) == len(set(names))


def test_no_variable_stands_for_two_flags() -> None:
    variables = [flag.environment for flag in FLAGS if flag.environment]
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize(("flag", "name"), _spellings(Verdict.HONOUR))
def test_every_honoured_spelling_sets_its_value(flag: Flag, name: str) -> None:
    parsed = parse(_words(flag, name), {}, FLAGS)
    expected = flag.kind.parse(_sample(flag)) if flag.kind.takes_value else True
    assert parsed[flag.dest] == ((expected,) if flag.repeats else expected)
    assert parsed.given == {flag.dest}


@pytest.mark.parametrize(("flag", "name"), _spellings(Verdict.IGNORE))
def test_every_ignored_spelling_is_taken_and_says_why(flag: Flag, name: str) -> None:
    words = [name, "anything"] if flag.kind.takes_value else [name]
    assert parse(words, {}, FLAGS).given == frozenset()
    assert flag.note


@pytest.mark.parametrize(("flag", "name"), _spellings(Verdict.REFUSE))
def test_every_refused_spelling_ends_the_start_by_name(flag: Flag, name: str) -> None:
    words = [name]
    if flag.kind.takes_value:
        choices = flag.kind.metavar[1:-1].split(",") if flag.kind.metavar[0] == "{" else ["7"]
        words.append(next(c for c in choices if c not in flag.neutral))
    with pytest.raises(FlagError, match=f"^{name}: not supported"):
        parse(words, {}, FLAGS)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        pytest.param(flag, value, id=f"{flag.names[-1]}={value}")
        for flag in FLAGS
        for value in flag.neutral
    ],
)
def test_every_neutral_value_passes(flag: Flag, value: object) -> None:
    if flag.kind.takes_value:
        parse([flag.names[-1], str(value)], {}, FLAGS)
    elif flag.off_names:
        parse([flag.off_names[0]], {}, FLAGS)
    elif flag.environment:
        parse([], {flag.environment: "0"}, FLAGS)


def _with_variable() -> list[Any]:
    return [
        pytest.param(flag, id=str(flag.environment))
        for flag in FLAGS
        if flag.environment and flag.verdict is Verdict.HONOUR
    ]


@pytest.mark.parametrize("flag", _with_variable())
def test_every_variable_sets_its_flag(flag: Flag) -> None:
    text = _sample(flag) if flag.kind.takes_value else "on"
    parsed = parse([], {str(flag.environment): f" {text} "}, FLAGS)
    expected = flag.kind.parse(text)
    assert parsed[flag.dest] == ((expected,) if flag.repeats else expected)


@pytest.mark.parametrize("flag", _with_variable())
def test_an_empty_variable_is_not_set(flag: Flag) -> None:
    parsed = parse([], {str(flag.environment): "  "}, FLAGS)
    assert parsed[flag.dest] == flag.default
    assert not parsed.given


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.off_names and flag.variable])
def test_llama_arg_no_switches_off_whatever_its_value(flag: Flag) -> None:
    name = str(flag.variable).replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
    parsed = parse([], {name: "1", str(flag.variable): "1"}, FLAGS)
    if flag.verdict is Verdict.HONOUR:
        assert parsed[flag.dest] is False


def test_every_honoured_flag_has_a_variable() -> None:
    without = [f for f in FLAGS if f.verdict is Verdict.HONOUR and f.environment is None]
    assert without == []


def test_ours_read_kvarts_variables() -> None:
    parsed = parse([], {"KVARTS_GRPC_PORT": "7", "KVARTS_TOP_N_SIGMA": "2"}, FLAGS)
    assert (parsed["grpc_port"], parsed["top_n_sigma"]) == (7, 2)


def test_the_command_line_wins_over_a_variable_and_that_over_a_file() -> None:
    file = "port = 1\nthreads = 3\n"
    environ = {"LLAMA_ARG_PORT": "2", "LLAMA_ARG_N_PARALLEL": "4"}
    parsed = parse(["--port", "5"], environ, FLAGS, config_files=[file])
    assert (parsed["port"], parsed["num_slots"], parsed["threads"]) == (5, 4, 3)
    assert parse([], environ, FLAGS, config_files=[file])["port"] == 2
    assert parse([], {}, FLAGS, config_files=[file])["port"] == 1


def test_a_repeated_flag_on_the_command_line_replaces_its_variable() -> None:
    parsed = parse(
        ["--api-key", "a", "--api-key", "b,c"], {"LLAMA_API_KEY": "from-the-environment"}, FLAGS
    )
    assert parsed["api_keys"] == (("a",), ("b", "c"))


def test_a_config_file_is_shared_with_other_programs() -> None:
    text = "[*]\n; note\nport = 9\nno-such-key = 1\nLLAMA_ARG_METRICS = 1\n[other]\nport = 10\n"
    assert parse([], {}, FLAGS, config_files=[text])["port"] == 9


def test_a_switch_of_a_config_file_may_be_its_negation() -> None:
    text = "no-slots = true\njinja = off\n"
    parsed = parse([], {}, FLAGS, config_files=[text])
    assert (parsed["has_slots"], parsed["use_jinja"]) == (False, False)


def test_underscores_are_hyphens_in_long_names() -> None:
    assert parse(["--ctx_size", "64"], {}, FLAGS)["context_tokens"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-flag"], "unknown flag --no-such-flag"),
        (["--port=1"], "write the value as its own word, --port VALUE"),
        (["stray"], "'stray' is no flag, and belongs to none"),
        (["--ctx-sise", "5"], "unknown flag --ctx-sise; did you mean --ctx-size?"),
        (["--no-mmap-at-all"], "unknown flag --no-mmap-at-all"),
        (["--port"], "--port: expected a value N"),
        (["--port", "65536"], "--port '65536': must be between 0 and 65535"),
        (["--port", "x"], "--port 'x': must be an integer between 0 and 65535"),
        (["--port", "9" * 400], "must be an integer"),
        (["-np", "0"], "-np '0': must be between -1 and 256, but not 0"),
        (["--temp", "nan"], "--temp 'nan': must be a finite number"),
        (["--repeat-penalty", "0"], "must be greater than 0"),
        (["-ctk", "q8_0"], "-ctk 'q8_0': must be one of f16, f32"),
        (["--samplers", "top_k;best"], "'best' is no sampler"),
        (["--sampler-seq", "kq"], "'q' is no sampler"),
        (["--logit-bias", "15043"], "must be TOKEN_ID followed by"),
        (["--chat-template-kwargs", "[]"], "must be a JSON object"),
        (["--chat-template-kwargs", "[" * 100_000], "must be a JSON object"),
        (["--device", "CUDA0"], "must be one of auto, cpu, gpu, metal, none"),
        (["--lora-scaled", "a.gguf"], "--lora-scaled 'a.gguf': 'a.gguf' must be FNAME:SCALE"),
        (["--lora-scaled", "a:1,b:x"], "'b:x' must be FNAME:SCALE with a finite number"),
        (["--lora-scaled", "a:nan"], "'a:nan' must be FNAME:SCALE"),
        (["--lora-scaled", "a:1e39"], "'a:1e39' must be FNAME:SCALE"),
        (["--lora-scaled", ":1"], "':1' must be FNAME:SCALE"),
        (["--lora-scaled", "a:"], "'a:' must be FNAME:SCALE"),
        (["--lora-max", "257"], "must be between 0 and 256"),
        (["--lora-max-rank", "0"], "must be between 1 and 512"),
        (["--tools", "get_info,read_file"], "'read_file' is not here, only get_info is"),
        (["--tools", ","], "must be get_info or all"),
        (["--rpc", "a:1"], "--rpc: not supported: a model is placed on one device"),
        (["--draft", "1"], "--draft: not supported: the peer has removed it"),
    ],
)
def test_what_cannot_be_honoured_is_named_with_value_and_limit(
    words: list[str], message: str
) -> None:
    with pytest.raises(FlagError) as caught:
        parse(words, {}, FLAGS)
    assert message in str(caught.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(FlagError, match=r"^LLAMA_ARG_PORT 'x': must be an integer"):
        parse([], {"LLAMA_ARG_PORT": "x"}, FLAGS)


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(FlagError) as caught:
        parse(["--api-key", "s3cret\n\ns3cret"], {}, FLAGS)
    assert "s3cret" not in str(caught.value)


# Source: llama.cpp's server tests, ServerProcess.start with its presets (contract section 7).
_PEER_SUITE = (
    "--port 8080 --temp 0.8 --seed 42 --host 127.0.0.1 --offline "
    "--hf-repo ggml-org/test-model-stories260K --batch-size 32 --no-slots --alias tinyllama-2 "
    "--ctx-size 512 --parallel 2 --n-predict 64 --no-jinja"
)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "--slots --jinja --metrics --cont-batching --kv-unified --verbose",
        "--no-cache-idle-slots --swa-full -fa on --no-mmproj",
        "--tags a,b --no-ui --api-key k --api-prefix /x --threads 2 --n-gpu-layers 0",
        "-ctk f32 -ctv f32 --backend_sampling --no-warmup --reasoning auto --no-models-autoload",
    ],
)
def test_what_the_peers_own_tests_pass_is_taken(extra: str) -> None:
    parse([*_PEER_SUITE.split(), *extra.split()], {}, FLAGS)


def test_help_names_every_flag_and_variable() -> None:
    text = render_help("kvarts-server", "A server.", FLAGS)
    for flag in FLAGS:
        for name in (*flag.names, *flag.off_names):
            assert name in text
        if flag.verdict is Verdict.HONOUR and flag.environment:
            assert flag.environment in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_help_of_a_row_tells_default_and_variable() -> None:
    port = next(flag for flag in FLAGS if flag.dest == "port")
    text = render_help("x", "y", [port])
    assert "port of those addresses (default: 8080) [LLAMA_ARG_PORT]" in text


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_parse_or_are_refused(words: list[str]) -> None:
    with contextlib.suppress(FlagError):
        assert set(parse(words, {}, FLAGS).values) == {flag.dest for flag in FLAGS}


def test_gateway_flags_are_not_the_services() -> None:
    assert {f.dest for f in FLAGS if f.scope is Scope.GATEWAY} >= {"hosts", "port", "has_slots"}

"""Every value of the gateway's command line: what is refused, and that the line says why."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from gateway import flags
from gateway.options import GatewayOptions

SERVICE = ("--service", "a:1")
PORTS = "must be an integer between 0 and 65535"
ADDRESS = "must be unix:/PATH or HOST:PORT with a port between 1 and 65535"
TRUTH = "must be one of on, enabled, true, 1, off, disabled, false, 0"


def parsed(*arguments: str, **variables: str) -> GatewayOptions:
    return flags.parse([*SERVICE, *arguments], variables)


def refusal(*arguments: str, **variables: str) -> str:
    with pytest.raises(flags.FlagError) as caught:
        parsed(*arguments, **variables)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--port", "99999", PORTS),
        ("--port", "65536", PORTS),
        ("--port", "-1", PORTS),
        ("--port", "abc", PORTS),
        ("--port", "1_0", PORTS),
        ("--port", "", PORTS),
        ("--timeout", "0", "must be an integer between 1 and 2147483647"),
        ("--sse-ping-interval", "-2", "must be an integer between -1 and 2147483647"),
        ("--shutdown-timeout", "soon", "must be a number between 0 and 86400"),
        ("--shutdown-timeout", "nan", "must be a number between 0 and 86400"),
        ("--shutdown-timeout", "-1", "must be a number between 0 and 86400"),
        ("--log-level", "loud", "must be one of debug, info, warning, error, off"),
        ("--log-format", "bogus", "must be one of text, json"),
        ("--cors-credentials", "maybe", TRUTH),
        ("--cors-origins", "a\r\nb", "must be printable ASCII"),
        ("--otlp-endpoint", "collector", "must be http://HOST:PORT or https://HOST:PORT"),
        ("--otlp-endpoint", "http://collector", "must be http://HOST:PORT or https://HOST:PORT"),
        ("--host", ",", "must name at least one address"),
        ("--host", "", "must name at least one address"),
        ("--api-prefix", "llm", "must start with /"),
        ("--chat-template-kwargs", "[1]", "must be a JSON object"),
        ("--chat-template-kwargs", "{", "must be a JSON object"),
        ("--path", "/nope", "is not a folder"),
        ("--api-key-file", "/nope", "No such file or directory"),
        ("--api-key-file", "/", "Is a directory"),
        ("--ssl-cert-file", "/nope", "No such file or directory"),
        ("--service-ca-file", "", "must be a path"),
        ("--service", "localhost", ADDRESS),
        ("--service", "localhost:99999", ADDRESS),
        ("--service", "localhost:0", ADDRESS),
        ("--service", "http://localhost:50051", ADDRESS),
        ("--service", "unix:", ADDRESS),
        ("--service", "", ADDRESS),
    ],
)
def test_a_refused_value_is_told_with_its_flag_and_its_limit(flag: str, value: str, limit: str):
    assert refusal(flag, value) == f"{flag} {value!r}: {limit}"
    if value and flag != "--service":
        variable = "KVARTS_" + flag[2:].replace("-", "_").upper()
        assert refusal(**{variable: value}) == f"{variable} {value!r}: {limit}"


def test_a_long_value_is_shown_in_part():
    assert refusal("--port", "9" * 500) == f"--port '{'9' * 80}': {PORTS}"


@pytest.mark.parametrize("value", ["", " ", ",", " , ,"])
def test_a_key_flag_without_a_key_does_not_leave_the_routes_open(value: str):
    assert refusal("--api-key", value) == "--api-key: holds no key"
    # A key elsewhere does not excuse it.
    assert refusal("--api-key", value, KVARTS_API_KEY="sesame") == "--api-key: holds no key"


@pytest.mark.parametrize("value", [" ", ",", " , ,"])
def test_a_key_variable_without_a_key_does_not_either(value: str):
    assert refusal(KVARTS_API_KEY=value) == "KVARTS_API_KEY: holds no key"


def test_an_empty_variable_counts_as_unset():
    assert parsed(KVARTS_API_KEY="", KVARTS_PORT="") == GatewayOptions(service="a:1")


def test_a_refused_key_is_not_shown():
    assert refusal("--service-key", "secrét") == "--service-key: must be printable ASCII"
    assert refusal("--service-key", "") == "--service-key: holds no key"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"# none\n\n", "holds no key"),
        (b"\xff\n", "is not UTF-8"),
        (b"k" * (1 << 20) + b"k", "is larger than 1048576 bytes"),
    ],
)
def test_a_key_file_without_a_key(tmp_path: Path, content: bytes, fault: str):
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert refusal("--api-key-file", str(file)) == f"--api-key-file {str(file)[:80]!r}: {fault}"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("--ssl-cert-file",), "--ssl-cert-file and --ssl-key-file: each needs the other"),
        (("--ssl-key-file",), "--ssl-cert-file and --ssl-key-file: each needs the other"),
        (
            ("--ssl-client-ca-file",),
            "--ssl-client-ca-file: needs --ssl-cert-file and --ssl-key-file",
        ),
        (
            ("--service-cert-file",),
            "--service-cert-file and --service-key-file: each needs the other",
        ),
        (
            ("--service-cert-file", "--service-key-file"),
            "--service-cert-file: needs --service-ca-file",
        ),
    ],
)
def test_files_that_would_do_nothing_alone(tmp_path: Path, names: tuple[str, ...], message: str):
    file = tmp_path / "x.pem"
    file.touch()
    assert refusal(*(word for name in names for word in (name, str(file)))) == message


@pytest.mark.parametrize(
    "address",
    ["localhost:50051", "10.0.0.1:1", "[::1]:65535", "unix:/run/k.sock", "dns:///kvarts:50051"],
)
def test_addresses_of_a_service(address: str):
    assert parsed("--service", address).service == address


def test_values_at_their_limits(tmp_path: Path):
    options = parsed(
        *("--port", "65535", "--timeout", "1", "--sse-ping-interval", "-1"),
        *("--shutdown-timeout", "0.5", "--log-level", "OFF", "--log-format", "json"),
        *("--path", str(tmp_path), "--chat-template-kwargs", '{"a": 1}', "--service-key", "s3"),
        *("--api-key", "a, b,"),
    )
    assert (options.port, options.timeout_s, options.sse_ping_interval_s) == (65535, 1, -1)
    assert (options.shutdown_timeout_s, options.log_level) == (0.5, "off")
    assert (options.log_format, options.static_path) == ("json", str(tmp_path))
    assert (options.chat_template_kwargs, options.service_key) == ({"a": 1}, "s3")
    assert options.api_keys == ("a", "b")


def test_the_version_is_told_like_the_servers(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        flags.parse(["--version"], {})
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvarts-gateway {version('kvarts')}\n"

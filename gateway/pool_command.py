"""kvarts-pools: shows how a service's memory is split, plans another split, and asks before it acts.

Needs only the service's address. A plan is the service's own (`validate_only`): nothing is decided
here.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import grpc
from google.protobuf import duration_pb2
from kvarts.v1 import rebuild_pb2, rebuild_pb2_grpc

from gateway.flag_values import unknown
from gateway.pool_table import plan_text, pool_table, stages_text, state_text

_SIZES = ("kv_pages", "swa_pages", "mamba_slots", "moe_cache_slots")
_SHORT_CALL_S = 10.0
_LOOK_S = 0.2
# Beyond the drain: compiling and copying.
_REBUILD_S = 600.0
_MAX_UNITS = 2**63 - 1
_DEFAULT_SERVICE = "127.0.0.1:50051"
_EPILOG = """\
Without a size it shows the pools. With one it shows what the change would do and asks; sizes that
are not named stay. A refusal names the pool, the numbers and the limit, and changes nothing.

  kvarts-pools
  kvarts-pools --kv-pages 4096 --moe-cache-slots 256
  kvarts-pools --kv-pages 4096 --drain-timeout 30 --yes
"""


def main() -> None:
    """Runs the command; exits 1 where the service refuses, is not there, or nobody says yes."""
    sys.exit(run(sys.argv[1:], sys.stdin, sys.stdout, sys.stderr))


def run(argv: Sequence[str], stdin: TextIO, stdout: TextIO, stderr: TextIO) -> int:
    """Does what the words say; returns the exit status."""
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    if others:
        parser.error(
            unknown(others[0], (f"--{name.replace('_', '-')}" for name in vars(arguments)))
        )
    try:
        key = _key(arguments)
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        with _channel(arguments) as channel:
            stub = rebuild_pb2_grpc.RebuildServiceStub(channel)
            pools = stub.GetPools(
                rebuild_pb2.GetPoolsRequest(), metadata=metadata, timeout=_SHORT_CALL_S
            )
            print(pool_table(pools), file=stdout)
            request = _request(arguments)
            if request is None:
                return 0
            return _change(stub, request, metadata, arguments, stdin, stdout)
    except grpc.RpcError as error:
        print(f"kvarts-pools: {_cause(error, arguments.service)}", file=stderr)
    except (OSError, KeyboardInterrupt) as error:
        print(f"kvarts-pools: {error or 'interrupted'}", file=stderr)
    return 1


def _change(
    stub: rebuild_pb2_grpc.RebuildServiceStub,
    request: rebuild_pb2.RebuildRequest,
    metadata: tuple[tuple[str, str], ...],
    arguments: argparse.Namespace,
    stdin: TextIO,
    stdout: TextIO,
) -> int:
    plan_request = rebuild_pb2.RebuildRequest(target=request.target, validate_only=True)
    plan = stub.Rebuild(plan_request, metadata=metadata, timeout=_SHORT_CALL_S)
    print(f"\n{plan_text(plan)}", file=stdout)
    if plan.current == plan.previous:
        print("\nnothing to do", file=stdout)
        return 0
    if arguments.plan:
        return 0
    if not arguments.yes and not _agrees(stdin, stdout):
        print("nothing was changed", file=stdout)
        return 1
    request.request_id = str(uuid.uuid4())
    timeout_s = _REBUILD_S + arguments.drain_timeout
    call = stub.Rebuild.future(request, metadata=metadata, timeout=timeout_s)
    for line in _progress(stub, call, request.request_id, metadata):
        print(line, file=stdout, flush=True)
    done = call.result()
    print(f"\n{plan_text(done)}\n{stages_text(done)}", file=stdout)
    return 0


def _progress(
    stub: rebuild_pb2_grpc.RebuildServiceStub,
    call: grpc.Future[rebuild_pb2.RebuildResponse],
    request_id: str,
    metadata: tuple[tuple[str, str], ...],
) -> Iterator[str]:
    """Yields what the rebuild is doing, as often as that is something else, until it has ended."""
    told = ""
    while not call.done():
        with contextlib.suppress(grpc.FutureTimeoutError):
            call.exception(timeout=_LOOK_S)
            return
        try:
            pools = stub.GetPools(
                rebuild_pb2.GetPoolsRequest(), metadata=metadata, timeout=_SHORT_CALL_S
            )
        except grpc.RpcError:
            continue  # how the rebuild itself ends says more
        doing = state_text(pools, request_id)
        if doing and doing != told:
            told = doing
            yield doing


def _agrees(stdin: TextIO, stdout: TextIO) -> bool:
    print("\nrebuild? [y/N] ", end="", file=stdout, flush=True)
    return stdin.readline().strip().lower() in ("y", "yes")


def _request(arguments: argparse.Namespace) -> rebuild_pb2.RebuildRequest | None:
    """What is asked for; None without any size."""
    sizes = {name: size for name in _SIZES if (size := getattr(arguments, name)) is not None}
    if not sizes:
        return None
    whole = int(arguments.drain_timeout)
    nanos = int((arguments.drain_timeout - whole) * 1e9)
    return rebuild_pb2.RebuildRequest(
        target=rebuild_pb2.PoolSizes(**sizes),
        drain_timeout=duration_pb2.Duration(seconds=whole, nanos=nanos),
    )


def _channel(arguments: argparse.Namespace) -> grpc.Channel:
    if arguments.service_ca_file is None:
        return grpc.insecure_channel(arguments.service)
    tls = grpc.ssl_channel_credentials(
        root_certificates=Path(arguments.service_ca_file).read_bytes(),
        private_key=_read_or_none(arguments.service_key_file),
        certificate_chain=_read_or_none(arguments.service_cert_file),
    )
    return grpc.secure_channel(arguments.service, tls)


def _key(arguments: argparse.Namespace) -> str:
    if arguments.api_key_file is None:
        return arguments.api_key or ""
    lines = Path(arguments.api_key_file).read_text().splitlines()
    return lines[0].strip() if lines else ""


def _read_or_none(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _cause(error: grpc.RpcError, address: str) -> str:
    if not isinstance(error, grpc.Call):
        return str(error)
    details = str(error.details())
    if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
        return f"no service at {address}: {_last_cause(details)}"
    return details


def _last_cause(details: str) -> str:
    """What went wrong in the end, out of gRPC's chain of who failed because of whom.

    Source: grpc-core's status strings: causes follow one another, separated by ": ".
    """
    if "DNS" in details or "resolving" in details:
        return "its name is not known"
    cause = " ".join(details.split()).rpartition(": ")[2] or "it does not answer"
    return cause[:1].lower() + cause[1:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvarts-pools",
        description="Shows how the memory of a kvarts-service is split, and splits it anew.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--kv-pages", type=_units, metavar="N", help="pages of full-attention keys and values")
    add("--swa-pages", type=_units, metavar="N", help="pages of sliding-window keys and values")
    add("--mamba-slots", type=_units, metavar="N", help="recurrent states")
    add("--moe-cache-slots", type=_units, metavar="N", help="experts in memory")
    add(
        "--drain-timeout",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="how long running requests may take to end (default: 0, refused unless idle)",
    )
    add("--plan", action="store_true", help="only show what the change would do")
    add("-y", "--yes", action="store_true", help="do not ask")
    add("--service", default=_DEFAULT_SERVICE, metavar="ADDRESS", help="default: %(default)s")
    add(
        "--api-key",
        metavar="KEY",
        help="an admin's key, which others may see in a list of processes",
    )
    add("--api-key-file", metavar="FILE", help="a file whose first line is that key")
    add("--service-ca-file", metavar="FILE", help="PEM roots: the service speaks TLS")
    add("--service-cert-file", metavar="FILE", help="PEM chain shown to the service")
    add("--service-key-file", metavar="FILE", help="PEM private key of that chain")
    return parser


def _units(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _MAX_UNITS:
        raise argparse.ArgumentTypeError(f"must be in [0, {_MAX_UNITS}], got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be in [0, 86400] seconds, got {text}")
    return value


if __name__ == "__main__":
    main()

"""The launcher with children and a service that are scripts: who stops whom, and with what status.

Each case runs a whole launcher in a process of its own, since it takes over signals.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]

# Reads its options, says so with its id, and waits for the end of its stdin, as the gateway does.
_GOOD_CHILD = """
    import json, os, sys
    options = json.loads(sys.stdin.readline())
    print(f"child {os.getpid()} {options['service']}\\n", end="", flush=True)
    sys.stdin.read()
"""

_STUBBORN_CHILD = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import json
    options = json.loads(sys.stdin.readline())
    print(f"child {os.getpid()} {options['service']}\\n", end="", flush=True)
    time.sleep(600)
"""

_WAITING = "await stop.wait(); return 0"
# Until the test says so, which is when the child has said who it is.
_ON_CUE = "await asyncio.to_thread(sys.stdin.readline); "


@dataclass
class Run:
    """A launcher that is running; `child_pid` is its gateway."""

    process: subprocess.Popen[str]
    child_pid: int
    address: str

    @property
    def folder(self) -> Path:
        return Path(self.address.removeprefix("unix:")).parent

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def cue(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def status(self) -> int:
        return self.process.wait(30)


@contextlib.contextmanager
def _running(
    child: str, serve: str, *, flags: tuple[str, ...] = (), expect_child: bool = True
) -> Generator[Run]:
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from service.command_line import server_command_line
        from service.launcher import launch

        async def serve(options, stop):
            print(f"serving {{options.private_socket}}\\n", end="", flush=True)
            {serve}

        options = server_command_line({flags!r}, {{"XDG_CONFIG_HOME": "/nowhere"}})
        sys.exit(launch(options, serve, [sys.executable, "-c", {child!r}]))
        """
    ).format(serve=serve, flags=list(flags), child=textwrap.dedent(child))
    # Short, since a socket's path is; and gone afterwards, though a killed launcher leaves its folder.
    temporary = tempfile.mkdtemp(prefix="kl-")
    environ = {"PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'proto'}", "TMPDIR": temporary}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=_ROOT,
        env=os.environ | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child_pid, address = 0, ""
    try:
        assert process.stdout is not None
        for _ in range(2 if expect_child else 0):
            words = process.stdout.readline().split()
            if words[0] == "child":
                child_pid, address = int(words[1]), words[2]
        yield Run(process, child_pid, address)
    finally:
        process.kill()
        process.communicate()
        if child_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child_pid, signal.SIGKILL)
        shutil.rmtree(temporary)


def _wait_until_gone(pid: int) -> None:
    """Returns when no such process is left; a process that never ends is the test's timeout."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("needs a descriptor of another's child")
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            import select

            select.select([descriptor], [], [], 30)
            assert not _is_running(pid)
        finally:
            os.close(descriptor)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_both_talk_over_a_private_socket() -> None:
    with _running(_GOOD_CHILD, _WAITING) as run:
        assert run.folder.stat().st_mode & 0o777 == 0o700
        run.signal(signal.SIGTERM)
        assert run.status() == 0
        assert not run.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_stops_both(number: signal.Signals) -> None:
    with _running(_GOOD_CHILD, _WAITING) as run:
        run.signal(number)
        assert run.status() == 0
        assert not _is_running(run.child_pid)


def test_a_child_that_will_not_stop_is_killed() -> None:
    with _running(_STUBBORN_CHILD, _WAITING, flags=("--shutdown-timeout", "0")) as run:
        run.signal(signal.SIGTERM)
        assert run.status() == 0
        assert not _is_running(run.child_pid)


def test_a_second_signal_ends_both_at_once() -> None:
    never = 'await stop.wait(); print("stopping", flush=True); await asyncio.sleep(600)'
    with _running(_STUBBORN_CHILD, never, flags=("--shutdown-timeout", "600")) as run:
        run.signal(signal.SIGTERM)
        assert run.process.stdout is not None
        assert run.process.stdout.readline() == "stopping\n"
        run.signal(signal.SIGTERM)
        assert run.status() == 128 + signal.SIGTERM
        assert not run.folder.exists()
        _wait_until_gone(run.child_pid)


def test_a_service_that_will_not_stop_is_ended_at_its_limit() -> None:
    never = "await asyncio.sleep(600)"
    with _running(_GOOD_CHILD, never, flags=("--shutdown-timeout", "0")) as run:
        run.signal(signal.SIGTERM)
        assert run.status() == 1
        _wait_until_gone(run.child_pid)


def test_no_orphan_survives_a_killed_launcher() -> None:
    with _running(_GOOD_CHILD, _WAITING) as run:
        run.process.kill()
        _wait_until_gone(run.child_pid)


@pytest.mark.parametrize(("ending", "status"), [("sys.exit(7)", 7), ("os.abort()", 1)])
def test_the_end_of_the_gateway_ends_the_server(ending: str, status: int) -> None:
    child = f"""
        import os, sys
        sys.stdin.readline()
        print(f"child {{os.getpid()}} unix:\\n", end="", flush=True)
        {ending}
    """
    with _running(child, _WAITING) as run:
        assert run.status() == status


def test_a_gateway_that_does_not_even_read_ends_the_server() -> None:
    with _running("import sys; sys.exit(3)", _WAITING, expect_child=False) as run:
        assert run.status() == 3


def test_a_service_that_cannot_start_ends_the_gateway() -> None:
    with _running(_GOOD_CHILD, _ON_CUE + "return 5") as run:
        run.cue()
        assert run.status() == 5
        assert not _is_running(run.child_pid)


def test_a_failure_of_the_service_ends_the_gateway() -> None:
    with _running(_GOOD_CHILD, _ON_CUE + 'raise RuntimeError("boom")') as run:
        run.cue()
        assert run.status() == 1
        assert not _is_running(run.child_pid)


def test_keys_never_show_in_a_process_list() -> None:
    with _running(_GOOD_CHILD, _WAITING, flags=("--api-key", "s3cret")) as run:
        shown = Path(f"/proc/{run.child_pid}/cmdline").read_bytes()
        shown += Path(f"/proc/{run.child_pid}/environ").read_bytes()
        assert b"s3cret" not in shown


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--grpc-port", "0", "--grpc-host", "::"), True),
        (("--host", "0.0.0.0", "--api-key", "k"), False),
        (("--grpc-host", "0.0.0.0"), False),
        ((), False),
    ],
)
def test_a_public_address_without_a_key_is_warned_about(
    flags: tuple[str, ...], is_warned: bool
) -> None:
    with _running(_GOOD_CHILD, _ON_CUE + "return 0", flags=flags) as run:
        run.cue()
        assert run.process.stderr is not None
        assert ("no key is asked for" in run.process.stderr.read()) is is_warned

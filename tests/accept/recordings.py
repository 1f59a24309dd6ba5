"""HTTP recordings: a kvarts-server, started as the recording says, is asked the same in order."""

from __future__ import annotations

import base64
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.accept.drift import is_quantised
from tests.accept.excused import EXCUSED, Excuse
from tests.accept.models import Models
from tests.accept.outcome import Failure, Unsupported
from tests.e2e.programs import READY_S, Program, running
from tests.golden.replay import Result, replay

_REFUSED = "not supported"
_PACKED = "base64:"
_POLL_S = 0.02


@dataclass(frozen=True)
class Verdict:
    """What became of one group's exchanges: names, and for the failed ones what differs first."""

    passed: Sequence[str]
    failed: Mapping[str, str]
    excused: Mapping[str, str]
    needless: Sequence[str]


def check_recording(group: str, recording: Mapping[str, Any], models: Models) -> str:
    """Replays a recording against a server of its own.

    Args:
        group: the recording's name in the table of excused exchanges.
        recording: its content.
        models: where the server's model is.

    Returns:
        How many exchanges passed, and what the table of excuses has too much.

    Raises:
        Unsupported: the server refuses the recording's flags, or every exchange is excused.
        Failure: an exchange that is not excused differs.
    """
    server = recording["server"]
    with tempfile.TemporaryDirectory() as folder:
        _furnish(Path(folder), server, models)
        compile_cache = models.config.compile_cache
        cached = ("--compile-cache", compile_cache) if compile_cache else ()
        # Texts of a quantised model hang on ties that the native kernels' rounding decides: it is
        # measured as a divergence, and the texts are those of the exact path.
        is_exact = is_quantised(models.find(server["model"]))
        exact = ("--kernels", "xla") if is_exact else ()
        flags = ("-m", server["model"], *server["args"], "--port", "0", *cached, *exact)
        with running("kvarts-server", *flags, cwd=folder) as program:
            url = _serving(program, server["args"])
            return report(judge(list(replay(recording, url)), EXCUSED.get(group, {})))


def judge(results: Sequence[Result], excuses: Mapping[str, Excuse]) -> Verdict:
    """Sorts results; `excuses` are by exchange."""
    passed: list[str] = []
    failed: dict[str, str] = {}
    excused: dict[str, str] = {}
    for result in results:
        excuse = excuses.get(result.name)
        if not result.differences:
            passed.append(result.name)
        elif excuse and excuse.covers(result.differences):
            excused[result.name] = excuse.reason
        else:
            failed[result.name] = result.differences[0]
    needless = [name for name in excuses if name not in failed and name not in excused]
    return Verdict(passed, failed, excused, needless)


def report(verdict: Verdict) -> str:
    """Says in one line what passed.

    Raises:
        Unsupported: nothing was left to pass.
        Failure: something failed.
    """
    num_exchanges = len(verdict.passed) + len(verdict.failed) + len(verdict.excused)
    if verdict.failed:
        lines = [f"{len(verdict.failed)} of {num_exchanges} exchanges differ"]
        lines += [f"    {name}: {first}" for name, first in verdict.failed.items()]
        raise Failure("\n".join(lines))
    if not verdict.passed:
        raise Unsupported("; ".join(dict.fromkeys(verdict.excused.values())))
    text = f"{len(verdict.passed)} of {num_exchanges} exchanges"
    if verdict.excused:
        text += ", the others excused"
    if verdict.needless:
        text += f"; excused in vain: {', '.join(verdict.needless)}"
    return text


def _furnish(folder: Path, server: Mapping[str, Any], models: Models) -> None:
    """Puts into `folder` what the server finds in its working directory."""
    for name in server.get("folders", ()):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in server.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_unpack(content))
    for name in _model_names(server):
        (folder / name).symlink_to(models.find(name).path.resolve())


def _model_names(server: Mapping[str, Any]) -> Iterator[str]:
    """The model and the adapters; a flag may give one with a scale, as `FILE:SCALE`."""
    yield server["model"]
    for argument in server["args"]:
        name = argument.partition(":")[0]
        if name.endswith(".gguf"):
            yield name


def _unpack(content: str) -> bytes:
    if content.startswith(_PACKED):
        return base64.b64decode(content.removeprefix(_PACKED))
    return content.encode()


def _serving(program: Program, arguments: Sequence[str]) -> str:
    """Waits until the server answers; returns its URL.

    Raises:
        Unsupported: it refuses its flags or its model.
        Failure: it ended for another reason, or never answered.
    """
    try:
        url = program.http_url()
        program.ready()
    except AssertionError as error:
        text = program.output.text().strip()
        refusals = [line for line in text.splitlines() if _REFUSED in line]
        if refusals:
            raise Unsupported(refusals[0]) from error
        raise Failure(f"the server does not start: {text}") from error
    prefix = dict(itertools.pairwise(arguments)).get("--api-prefix", "")
    deadline_s = time.monotonic() + READY_S
    while not httpx.get(f"{url}{prefix}/health").is_success:
        if time.monotonic() > deadline_s:
            raise Failure(f"/health does not answer 200: {program.output.text()}")
        time.sleep(_POLL_S)
    return url

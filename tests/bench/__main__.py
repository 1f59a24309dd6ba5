"""`python -m tests.bench`: Kvarts and llama.cpp on this machine, in turn, as one table.

Every figure is a median over rounds in which both sides take turns, each in a process of its own.
Machines differ and so do their hours: compare the ratios of one run. Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path

from service.command_line import service_command_line
from service.fetch import FetchError
from tests.bench import (
    busy_box,
    engine_speed,
    first_token,
    grammar_cost,
    pool_speed,
    roofline,
    served_speed,
    slot_speed,
    start_up,
)
from tests.bench.child import ChildError
from tests.bench.figures import Figure
from tests.bench.models import ENTRIES, Bars, Model, find_models
from tests.bench.peer import Peer, PeerError, find_peer
from tests.bench.report import (
    ReportError,
    as_text,
    joined,
    read_json,
    split_page,
    write_json,
    write_page,
)
from tests.bench.setting import Setting

Measurement = Callable[[Setting], Iterator[Figure]]

MEASUREMENTS: dict[str, Measurement] = {
    "engine": engine_speed.measure,
    "served": served_speed.measure,
    "busy": busy_box.measure,
    "first_token": first_token.measure,
    "grammar": grammar_cost.measure,
    "start": start_up.measure,
    "slots": slot_speed.measure,
    "pools": pool_speed.measure,
    "roofline": roofline.measure,
}

_EPILOG = """\
measurements (--only):
  {measurements}

models (--models): {models}

llama.cpp is measured where it is there: the engine through llama-cpp-python (pip install -e
'.[bench]'), engine and server through programs named with --llama-bench and --llama-server. What
is missing is named and its column stays empty. The whole run takes about {whole} minutes; one
measurement of one model two or three.

  make bench ARGS="--only engine --models q4_1 --rounds 3"
  make bench ARGS="--llama-server BUILD/bin/llama-server --page docs/benchmarks.md --json b.json"
"""


def main() -> int:
    """Runs what was asked for; returns the exit status: 1 if it could not run."""
    arguments = _parser().parse_args()
    try:
        earlier = _earlier(arguments)
        peer = find_peer(arguments.llama_bench, arguments.llama_server, arguments.llama_quantize)
        models, lacks = _models(arguments, peer)
        for lack in [*peer.missing(), *lacks]:
            _say(f"note: {lack}")
        setting = Setting(
            models=tuple(models),
            peer=peer,
            rounds=arguments.rounds,
            threads=arguments.threads,
            kernels=arguments.kernels,
            compile_cache=str(_cache_dir() / "xla"),
            say=_say,
        )
        facts = _facts(setting)
        figures = earlier
        for name in arguments.only:
            for figure in MEASUREMENTS[name](setting):
                figures = joined(figures, [figure])
                if arguments.json:  # kept at once: the next one may take long, or fail
                    write_json(arguments.json, figures, facts)
    except (PeerError, FetchError, ChildError, ReportError) as error:
        _say(f"error: {error}")
        return 1
    print(as_text(figures))
    if arguments.page:
        write_page(arguments.page, figures, facts)
    return 0


def _earlier(arguments: argparse.Namespace) -> list[Figure]:
    """What is kept already; a page that could not be written is refused before anything runs."""
    if arguments.page:
        split_page(arguments.page)
    return read_json(arguments.json) if arguments.json and arguments.json.is_file() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench",
        usage='make bench ARGS="[options]"',
        description=__doc__,
        epilog=_EPILOG.format(
            measurements="\n  ".join(
                f"{name:12} {sys.modules[run.__module__].__doc__.splitlines()[0]}"  # pyright: ignore[reportOptionalMemberAccess]
                for name, run in MEASUREMENTS.items()
            ),
            models=", ".join(ENTRIES),
            whole=30,
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--only", type=_names(MEASUREMENTS), default=list(MEASUREMENTS), metavar="A,B")
    add("--models", type=_names(ENTRIES), default=list(ENTRIES), metavar="A,B")
    add("--model", type=Path, metavar="FILE", help="measure this GGUF file instead, without bars")
    add("--rounds", type=int, default=5, help="turns of each side (default: %(default)s)")
    add("--threads", type=int, default=2, help="threads of each side (default: %(default)s)")
    add("--kernels", default="auto", help="auto, native or xla (default: %(default)s)")
    add("--llama-bench", type=Path, metavar="PROGRAM")
    add("--llama-server", type=Path, metavar="PROGRAM")
    add("--llama-quantize", type=Path, metavar="PROGRAM")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="also keep every figure there, unrounded, beside those of earlier runs",
    )
    add("--page", type=Path, metavar="FILE", help="also put the table between its marks there")
    return parser


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    choices = list(known)

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return names

    return read


def _models(arguments: argparse.Namespace, peer: Peer) -> tuple[list[Model], list[str]]:
    if arguments.model is not None:
        if not arguments.model.is_file():
            raise PeerError(f"--model {arguments.model}: no such file")
        return [Model(arguments.model.stem, arguments.model, Bars())], []
    return find_models(arguments.models, _cache_dir(), peer)


def _cache_dir() -> Path:
    """The user's cache folder, as the service has it."""
    return service_command_line([], os.environ).model.cache_dir


def _facts(setting: Setting) -> list[str]:
    return [
        f"{date.today().isoformat()}, {_processor()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {setting.threads} threads each side",
        f"medians of {setting.rounds} rounds, in turn",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Builds the native kernels with sanitizers, apart, and runs their tests against that library.

`make sanitize` runs it. The library that is installed stays as it is. Of the tests those run that
need native kernels, wherever they are; arguments are pytest's and come on top. After the word
`survivors`, which `make survivors` says, arguments are those of `tests.survivors`, which runs instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.kernels.native.build import compile_library

_OPTIONS = {
    # The interpreter's own leaks are not what is looked for.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def main(arguments: list[str]) -> int:
    """Returns the exit status of what ran."""
    with tempfile.TemporaryDirectory() as folder:
        library, reports = Path(folder) / "libkvarts_kernels.so", Path(folder) / "report"
        try:
            compile_library(library, "-DSANITIZE=address,undefined")
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
            return 1
        # The interpreter is not instrumented, so the runtimes must be there before it.
        preload = " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so"))
        command = [sys.executable, "-m", *_module(arguments), f"--native-library={library}"]
        # Into files: pytest would take what a dying process writes with it.
        options = {name: f"{given}:log_path={reports}" for name, given in _OPTIONS.items()}
        environment = os.environ | options | {"LD_PRELOAD": preload, "JAX_PLATFORMS": "cpu"}
        status = subprocess.run(command, env=environment, check=False).returncode
        found = sorted(Path(folder).glob(f"{reports.name}.*"))
        for report in found:
            print(report.read_text(errors="replace"), file=sys.stderr)
        return status or len(found)


def _module(arguments: list[str]) -> list[str]:
    if arguments[:1] == ["survivors"]:
        return ["tests.survivors", *arguments[1:]]
    return ["pytest", "-m", "not slow and not device", *arguments]


def _runtime(name: str) -> str:
    """Where the compiler keeps a library."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

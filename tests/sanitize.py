"""Builds the native kernels with sanitizers, apart, and runs their tests against that library.

`make sanitize` runs it. The library that is installed stays as it is. Of the tests those run that
need native kernels, wherever they are; arguments are pytest's and come on top.
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
    "JAX_PLATFORMS": "cpu",
}


def main(arguments: list[str]) -> int:
    """Returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libkvarts_kernels.so"
        try:
            compile_library(library, "-DSANITIZE=address,undefined")
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
            return 1
        # The interpreter is not instrumented, so the runtimes must be there before it.
        preload = " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so"))
        command = [sys.executable, "-m", "pytest", f"--native-library={library}"]
        command += ["-m", "not slow and not device", *arguments]
        environment = os.environ | _OPTIONS | {"LD_PRELOAD": preload}
        return subprocess.run(command, env=environment, check=False).returncode


def _runtime(name: str) -> str:
    """Where the compiler keeps a library."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

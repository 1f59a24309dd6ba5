"""Builds the native kernels while the package is installed, where a compiler is.

A hatchling build hook. Without a compiler, CMake or jaxlib's headers, or when compiling fails, the
package is installed without them: everything then runs on XLA alone, with one warning at start.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCES = Path(__file__).parent
_LIBRARY = "libkvarts_kernels.so"


class NativeKernels(BuildHookInterface[Any]):
    """Compiles the library beside its sources and adds it to the wheel."""

    PLUGIN_NAME = "native-kernels"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel, also an editable one, is put together."""
        target = _SOURCES / _LIBRARY
        try:
            if not is_current(target):
                compile_library(target)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"native kernels were not built: {_reason(error)}")
            return
        build_data["artifacts"].append(f"/engine/kernels/native/{_LIBRARY}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(target: Path, *options: str) -> None:
    """Compiles the library and moves it to `target` when it is whole.

    Args:
        target: Where it goes.
        options: More arguments of CMake, as `-DSANITIZE=address`.

    Raises:
        OSError: There is no CMake, or no jaxlib, whose headers are needed.
        subprocess.CalledProcessError: Configuring or compiling failed; `stderr` says why.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise OSError("cmake was not found")
    with tempfile.TemporaryDirectory() as folder:
        include = f"-DXLA_FFI_INCLUDE={_ffi_headers()}"
        _run(cmake, "-S", str(_SOURCES), "-B", folder, include, *options)
        _run(cmake, "--build", folder, "--parallel", "2")
        built = Path(folder) / _LIBRARY
        staged = target.with_suffix(".tmp")
        shutil.copyfile(built, staged)
        staged.replace(target)


def is_current(target: Path) -> bool:
    """Whether the library is newer than everything it is made of."""
    sources = [path for path in _SOURCES.iterdir() if path.suffix in (".cc", ".h", ".txt")]
    built = target.stat().st_mtime if target.is_file() else 0.0
    return all(path.stat().st_mtime < built for path in sources)


def _ffi_headers() -> Path:
    """What `jax.ffi.include_dir()` returns, without importing jax."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise OSError("jaxlib was not found")
    return Path(spec.submodule_search_locations[0]) / "include"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or error.stdout or str(error)).strip()[-2000:]
    return str(error)


if __name__ == "__main__":
    compile_library(_SOURCES / _LIBRARY, *sys.argv[1:])

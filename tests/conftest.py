"""Hypothesis profiles: what `make test` runs, and the longer search of `make nightly`.

Also the option by which `make sanitize` puts another library in the place of the native kernels, and
the length of a test that goes on for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", type=Path, help="native kernels to use, a shared library")
    parser.addoption(
        "--storm-minutes",
        type=float,
        default=10.0,
        help="how long threads change adapters under streams, in the slow test of that",
    )


def pytest_configure(config: pytest.Config) -> None:
    library: Path | None = config.getoption("native_library")
    if library is None:
        return
    if not library.is_file():
        raise pytest.UsageError(f"--native-library: {library} is not a file")
    from engine.kernels import native  # imports jax: only where it is asked for

    native.LIBRARY = library


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of another library only the tests that need the native kernels say anything."""
    if config.getoption("native_library") is None:
        return
    from tests.native import NOT_BUILT

    others = [item for item in items if not _has_reason(item, NOT_BUILT)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _has_reason(item, NOT_BUILT)]


def _has_reason(item: pytest.Item, reason: str) -> bool:
    return any(mark.kwargs.get("reason") == reason for mark in item.iter_markers("skipif"))

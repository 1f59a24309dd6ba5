"""Which kernels a load takes, and what it says where there are none."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import pytest

from engine.errors import InvalidField
from engine.kernels import native
from engine.loading import choose_kernels

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="they run on a CPU only")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> str:
    why = "were not built (no C++ compiler at installation?)"
    monkeypatch.setattr(native, "_loaded", lambda: (None, why))
    return why


def test_built_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: ("portable", ""))
    assert choose_kernels("auto")
    assert choose_kernels("native")
    assert not choose_kernels("xla")


def test_without_them_auto_is_xla_and_says_so(
    missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not choose_kernels("auto")
    assert [record.getMessage() for record in caplog.records] == [
        f"the native kernels {missing}: products run on XLA, several times slower"
    ]


def test_asked_for_and_missing_is_refused(missing: str) -> None:
    with pytest.raises(InvalidField, match="native kernels were not built"):
        choose_kernels("native")


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidField, match="must be auto, native or xla, got 'fast'"):
        choose_kernels("fast")


def test_a_library_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libkvarts_kernels.so"
    broken.write_text("not a library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    isa, why = native._loaded.__wrapped__()  # pyright: ignore[reportPrivateUsage] -- past its cache
    assert isa is None
    assert "cannot be loaded" in why

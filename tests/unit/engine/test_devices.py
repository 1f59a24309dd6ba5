"""Which backend a load takes, and what it says of one that is not there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest
from jax.extend import backend as jax_backend

from engine.devices import choose_device
from engine.errors import InvalidField

Settings = dict[str, object]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Collects what is set, and sets nothing."""
    found: Settings = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    return found


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Callable[[str], None]:
    """Pretends that jax has a backend, besides the CPU, that it takes by itself."""

    def pretend(name: str) -> None:
        cleared: list[None] = []
        monkeypatch.setattr(jax_backend, "clear_backends", lambda: cleared.append(None))
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu" if cleared else name)

    return pretend


@pytest.mark.parametrize(
    ("found", "wanted", "selected"),
    [
        ("cpu", "auto", "cpu"),
        ("gpu", "auto", "gpu"),
        ("mps", "auto", "cpu"),
        ("cpu", "cpu", "cpu"),
        ("gpu", "gpu", "gpu"),
        ("mps", "metal", "metal"),
    ],
)
def test_what_is_there_is_taken(
    backend: Callable[[str], None], settings: Settings, found: str, wanted: str, selected: str
) -> None:
    backend(found)
    assert choose_device(wanted) == selected
    is_exact = settings.get("jax_default_matmul_precision") == "highest"
    assert is_exact == (selected != "cpu")
    assert settings.get("jax_platforms") == (
        "cpu" if wanted == "cpu" or (found, selected) == ("mps", "cpu") else None
    )


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        ("cpu", "gpu", "gpu was asked for, but jax has only cpu here: install the extra cuda"),
        ("cpu", "metal", "metal was asked for, but jax has only cpu here: install the extra metal"),
        ("mps", "gpu", "gpu was asked for, but jax has only mps here"),
        ("gpu", "cpu", "cpu was asked for, but this process already runs on gpu"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    backend: Callable[[str], None], found: str, wanted: str, message: str
) -> None:
    backend(found)
    with pytest.raises(InvalidField, match=message) as refusal:
        choose_device(wanted)
    assert refusal.value.field == "device"


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidField, match="must be one of auto, cpu, gpu, metal, got 'CUDA0'"):
        choose_device("CUDA0")

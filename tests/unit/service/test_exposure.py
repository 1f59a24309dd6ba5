from __future__ import annotations

import pytest

from service.exposure import exposure_warning, is_loopback


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "/a/b.sock"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example", ""])
def test_public(host: str) -> None:
    assert not is_loopback(host)


def test_only_a_public_address_without_a_key_is_warned_about() -> None:
    assert exposure_warning(["127.0.0.1"], has_key=False) is None
    assert exposure_warning(["0.0.0.0"], has_key=True) is None
    warning = exposure_warning(["127.0.0.1", "0.0.0.0"], has_key=False)
    assert warning is not None
    assert "0.0.0.0 can be reached from other machines" in warning

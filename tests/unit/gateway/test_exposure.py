"""When a gateway says that anybody can use it."""

from __future__ import annotations

import pytest

from gateway.exposure import exposure_warning
from gateway.options import GatewayOptions


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_address_for_everybody_without_a_key_is_warned_of(host: str):
    options = GatewayOptions(service="a:1", hosts=("127.0.0.1", host))
    warning = exposure_warning(options)
    assert warning is not None
    assert f"!! {host} can be reached from other machines" in warning
    assert "--api-key" in warning


def test_a_key_or_a_local_address_is_nothing_to_warn_of():
    local = ("127.0.0.1", "127.8.0.1", "::1", "localhost", "/run/gateway.sock")
    assert exposure_warning(GatewayOptions(service="a:1", hosts=local)) is None
    keyed = GatewayOptions(service="a:1", hosts=("0.0.0.0",), api_keys=("key",))
    assert exposure_warning(keyed) is None

"""Whether anybody on other machines can use a gateway, and how loudly to say so."""

from __future__ import annotations

import ipaddress

from gateway.options import GatewayOptions


def exposure_warning(options: GatewayOptions) -> str | None:
    """The warning that addresses without a key deserve, lines without a last newline."""
    public = [host for host in options.hosts if not _is_local(host)]
    if options.api_keys or options.api_key_file or not public:
        return None
    line = "!" * 78
    return (
        f"{line}\n"
        f"!! {', '.join(public)} can be reached from other machines, and this gateway asks for\n"
        "!! no key: unless the service asks for one, whoever reaches it can use the model.\n"
        "!! Set --api-key or --api-key-file, or listen on 127.0.0.1.\n"
        f"{line}"
    )


def _is_local(host: str) -> bool:
    if host.endswith(".sock") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

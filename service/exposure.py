"""Whether a server can be reached from other machines by anybody, and how loudly to say so."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


def is_loopback(host: str) -> bool:
    """Says whether an address can only be reached from this machine (Unix sockets included)."""
    if host.endswith(".sock") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure_warning(hosts: Iterable[str], *, has_key: bool) -> str | None:
    """Returns the warning that a server without a key on these addresses deserves."""
    public = [host for host in hosts if not is_loopback(host)]
    if has_key or not public:
        return None
    line = "!" * 78
    return (
        f"{line}\n"
        f"!! {', '.join(public)} can be reached from other machines, and no key is asked for:\n"
        "!! whoever reaches it can use the model and read what others are sending.\n"
        "!! Set --api-key or --api-key-file, or listen on 127.0.0.1.\n"
        f"{line}"
    )

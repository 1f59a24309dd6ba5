"""Which of jax's backends runs the model; a choice of the whole process, made at its first load."""

from __future__ import annotations

from typing import cast

import jax

from engine.errors import InvalidField
from engine.memory.available import available_bytes

DEVICES = ("auto", "cpu", "gpu", "metal")

# What jax calls them, and what brings them.
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "metal": "mps"}
_REMEDIES = {
    "gpu": "install the extra cuda, and NVIDIA's driver",
    "metal": "install the extra metal, on macOS with Apple silicon",
}


def choose_device(wanted: str) -> str:
    """Selects what runs the programs; nothing may be on a device yet.

    Args:
        wanted: "cpu", "gpu", "metal" (experimental), or "auto": a GPU if there is one, else the CPU.

    Returns:
        What was selected, one of the first three.

    Raises:
        InvalidField: It is not there, or `wanted` is none of these.
    """
    if wanted not in DEVICES:
        raise InvalidField("device", f"must be one of {', '.join(DEVICES)}, got {wanted!r}")
    if wanted == "cpu":
        jax.config.update("jax_platforms", "cpu")
    # Where a plugin has brought an accelerator, jax takes that by itself.
    found = jax.default_backend()
    if wanted == "auto" and found not in ("cpu", "gpu"):
        # Metal is experimental and runs only where it was asked for.
        found = _fall_back_to_cpu()
    if wanted != "auto" and found != _PLATFORMS[wanted]:
        raise InvalidField("device", _refusal(wanted, found))
    if found != "cpu":
        # The default of a GPU rounds what is multiplied to ten bits.
        jax.config.update("jax_default_matmul_precision", "highest")
    return "metal" if found == "mps" else found


def available_memory() -> int | None:
    """Returns the bytes that can still be had where models lie, None where nobody tells."""
    if jax.default_backend() == "cpu":
        return available_bytes()
    stats = cast("dict[str, int]", jax.devices()[0].memory_stats() or {})
    if "bytes_limit" not in stats:
        return None
    return max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def _fall_back_to_cpu() -> str:
    # It brings much that nobody else needs, and this is rare.
    from jax.extend.backend import clear_backends

    jax.config.update("jax_platforms", "cpu")
    clear_backends()
    return jax.default_backend()


def _refusal(wanted: str, found: str) -> str:
    if wanted == "cpu":
        return f"cpu was asked for, but this process already runs on {found}"
    return f"{wanted} was asked for, but jax has only {found} here: {_REMEDIES[wanted]}"

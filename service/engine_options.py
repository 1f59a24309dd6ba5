"""The engine's layout out of a parsed command line."""

from __future__ import annotations

from pathlib import Path

from engine.types import EngineConfig
from service.flags import FlagError, Parsed

_DEFAULT_SLOTS = 4


def embeds(parsed: Parsed) -> bool:
    """Whether vectors are served."""
    return parsed["embeds"] or parsed["reranks"]


def engine_config(parsed: Parsed, cache_dir: Path) -> EngineConfig:
    """Builds the layout; compiled programs and hashes are kept in `cache_dir`.

    Raises:
        FlagError: Flags contradict each other.
    """
    if parsed["cache_type_k"] != parsed["cache_type_v"]:
        raise FlagError(
            f"-ctk {parsed['cache_type_k']} and -ctv {parsed['cache_type_v']}: "
            "keys and values have one type"
        )
    compile_cache = parsed["compile_cache"] or str(cache_dir / "xla")
    is_automatic = parsed["num_slots"] == -1
    num_slots = _DEFAULT_SLOTS if is_automatic else parsed["num_slots"]
    unified = parsed["unified"]
    budget_mib = parsed["memory_budget_mib"]
    cache_ram_mib = _cache_ram_mib(parsed)
    return EngineConfig(
        context_tokens=_context_tokens(parsed, num_slots),
        num_slots=num_slots,
        unified=is_automatic if unified is None else unified,
        slot_tokens=parsed["slot_tokens"],
        chunk_tokens=min(parsed["batch_tokens"], parsed["ubatch_tokens"]),
        kv_dtype=parsed["cache_type_k"],
        kv_pages=parsed["kv_pages"],
        swa_pages=parsed["swa_pages"],
        swa_evict_interval=parsed["swa_evict_interval"],
        mamba_slots=parsed["mamba_slots"],
        moe_cache_slots=parsed["moe_cache_slots"],
        prefill_overlap=parsed["prefill_overlap"],
        memory_budget=None if budget_mib is None else budget_mib << 20,
        kv_reserve_tokens=parsed["kv_reserve_tokens"],
        device="cpu" if parsed["device"] == "none" else parsed["device"],
        kernels=parsed["kernels"],
        embeds=embeds(parsed),
        sleep_idle_s=None if parsed["sleep_idle_s"] == -1 else parsed["sleep_idle_s"],
        slot_similarity=parsed["slot_similarity"],
        context_shift=parsed["context_shift"],
        host_cache_bytes=None if cache_ram_mib == -1 else cache_ram_mib << 20,
        queue_requests=parsed["queue_requests"],
        queue_bytes=parsed["queue_bytes"],
        threads=None if parsed["threads"] == -1 else parsed["threads"],
        compile_cache=None if compile_cache == "off" else compile_cache,
        identity_cache=str(cache_dir / "identity"),
    )


def _cache_ram_mib(parsed: Parsed) -> int:
    """Under a budget none by itself: pages of the pool take what there is.

    Raises:
        FlagError: It has no limit, and a budget is one.
    """
    cache_ram_mib = parsed["cache_ram_mib"]
    if parsed["memory_budget_mib"] is None:
        return cache_ram_mib
    if cache_ram_mib == -1:
        raise FlagError("--cache-ram -1 is no limit, and comes off --memory-budget: give it one")
    return cache_ram_mib if "cache_ram_mib" in parsed.given else 0


def _context_tokens(parsed: Parsed, num_slots: int) -> int:
    """As given, else room for all that slots may have, else 0: what the model was trained with."""
    if "context_tokens" in parsed.given:
        return parsed["context_tokens"]
    return num_slots * parsed["slot_tokens"]

"""The split of memory as text: a table with a bar for every pool, and what a change would do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.v1 import rebuild_pb2

_NAMES = {
    rebuild_pb2.POOL_KIND_KV: "kv",
    rebuild_pb2.POOL_KIND_SWA: "swa",
    rebuild_pb2.POOL_KIND_MAMBA: "mamba",
    rebuild_pb2.POOL_KIND_MOE_CACHE: "moe_cache",
}
_SIZES = {
    "kv": "kv_pages",
    "swa": "swa_pages",
    "mamba": "mamba_slots",
    "moe_cache": "moe_cache_slots",
}
_DOING = {
    rebuild_pb2.REBUILD_STATE_SERVING: "compiling for the new sizes; requests are served",
    rebuild_pb2.REBUILD_STATE_DRAINING: "waiting for requests that run; new ones wait",
    rebuild_pb2.REBUILD_STATE_REBUILDING: "replacing the pools",
}
_BAR_WIDTH = 32
_LEGEND = "# used by requests   = held by idle slots   - cached   . free"
_STEPS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def pool_table(reply: rebuild_pb2.GetPoolsResponse) -> str:
    """All pools, what they may take, and what they are doing."""
    rows = [("pool", "units", "of", "bytes", "floor", "ceiling", "use")]
    for pool in reply.pools:
        unit = size_text(pool.unit_bytes)
        rows.append(
            (
                _NAMES.get(pool.kind, "?"),
                str(pool.size),
                f"{unit}, {pool.unit_tokens} tokens" if pool.unit_tokens else unit,
                size_text(pool.size * pool.unit_bytes),
                str(pool.floor),
                str(pool.ceiling),
                bar(pool),
            )
        )
    state = rebuild_pb2.RebuildState.Name(reply.state).removeprefix("REBUILD_STATE_").lower()
    lines = [*aligned(rows), "", _LEGEND]
    lines.append(
        f"kv pages and experts may take {size_text(reply.budget_bytes)}; "
        f"{size_text(reply.fixed_bytes)} are fixed; {state}"
    )
    if reply.HasField("prefill_overlap"):
        lines.append(f"prompts read experts ahead: {'yes' if reply.prefill_overlap else 'no'}")
    return "\n".join(lines)


def bar(pool: rebuild_pb2.Pool) -> str:
    """What holds the units, in proportion; whatever there is any of has a mark."""
    parts = [(pool.used, "#"), (pool.pinned, "="), (pool.cached, "-"), (pool.free, ".")]
    widths = [_width(count, pool.size) for count, _ in parts]
    # The longest gives way to the marks of those that would have had none.
    widths[widths.index(max(widths))] += _BAR_WIDTH - sum(widths)
    marks = "".join(mark * width for (_, mark), width in zip(parts, widths, strict=True))
    return f"[{marks}]"


def plan_text(reply: rebuild_pb2.RebuildResponse) -> str:
    """What a change would do, or did."""
    rows = [("pool", "now", "then")]
    before = {field.name: size for field, size in reply.previous.ListFields()}
    after = {field.name: size for field, size in reply.current.ListFields()}
    for name, field in _SIZES.items():
        if field in after:
            now, then = before.get(field, 0), after[field]
            rows.append((name, str(now), str(then) if then != now else "same"))
    plan, kept, dropped = reply.plan, reply.kept, reply.dropped
    lines = [
        *aligned(rows),
        "",
        f"needs {size_text(plan.needed_bytes)} of {size_text(plan.budget_bytes)}; "
        f"at its peak {size_text(plan.peak_bytes)} are in use",
        f"kept: {_held(kept)}",
        f"dropped: {_held(dropped)}",
    ]
    if reply.erased_slot_ids:
        lines.append(f"erased slots: {', '.join(map(str, reply.erased_slot_ids))}")
    if reply.busy:
        lines.append("requests are running: they are waited for")
    return "\n".join(lines)


def stages_text(reply: rebuild_pb2.RebuildResponse) -> str:
    """How long each stage took."""
    parts = [
        f"{rebuild_pb2.RebuildStage.Name(time.stage).removeprefix('REBUILD_STAGE_').lower()} "
        f"{time.elapsed.ToTimedelta().total_seconds():.3f}"
        for time in reply.stage_times
    ]
    total = reply.elapsed.ToTimedelta().total_seconds()
    return f"done in {total:.3f} s ({', '.join(parts)})" if parts else "nothing to do"


def state_text(reply: rebuild_pb2.GetPoolsResponse, request_id: str) -> str:
    """What the rebuild of this id is doing; "" while it has not begun."""
    if reply.last_request_id != request_id:
        return ""
    return _DOING.get(reply.state, "")


def size_text(num_bytes: int) -> str:
    """A size in the largest unit that leaves one digit before the point; may be negative."""
    value, step = float(abs(num_bytes)), 0
    while value >= 1024 and step < len(_STEPS) - 1:
        value /= 1024
        step += 1
    number = f"{value:.1f}" if step and value < 100 else f"{value:.0f}"
    return f"{'-' if num_bytes < 0 else ''}{number} {_STEPS[step]}"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width; the first and the last to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _width(count: int, size: int) -> int:
    if not count or not size:
        return 0
    return max(1, round(_BAR_WIDTH * count / size))


def _held(held: rebuild_pb2.HeldState) -> str:
    parts = [f"{held.prefix_tokens} tokens of prefixes", f"{len(held.slot_ids)} slots"]
    if held.snapshots:
        parts.append(f"{held.snapshots} snapshots")
    if held.experts:
        parts.append(f"{held.experts} experts")
    return ", ".join(parts)

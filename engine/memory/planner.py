"""How large contexts and pools are: pure integers, no arrays, no model.

`plan_memory` turns the flags and the model's figures into sizes, or refuses with the numbers. What
fits a budget of bytes is `split`'s to say.

Example:
    >>> shape = KvShape(num_layers=2, num_kv_heads=4, key_dim=8, value_dim=8)
    >>> plan = plan_memory(EngineConfig(context_tokens=500, num_slots=2), shape, 2048)
    >>> plan.slot_context_tokens, plan.kv_pages, plan.page_bytes
    (512, 18, 8192)
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidField
from engine.types import EngineConfig

# llama.cpp pads every context to this many tokens (llama_context, n_ctx and n_ctx_seq).
CONTEXT_STEP_TOKENS = 256
# One page for a prompt and one to generate into: with fewer no request can make progress.
MIN_KV_PAGES = 2

ELEMENT_BYTES = {"f16": 2, "f32": 4}
# Kept behind a sliding window, so that a prompt that drops a few last tokens is still reused.
WINDOW_SLACK_TOKENS = 16
# A running row's own, a snapshot before the end of its prompt, and one of another prompt.
STATES_PER_SLOT = 3


@dataclass(frozen=True)
class KvShape:
    """What one token costs in the pools.

    `num_layers` counts the layers that attend to everything, `num_window_layers` those that see
    the last `window` tokens (0 where there are none). A sequence's recurrent state takes
    `state_bytes` over all its layers. Without attention layers pages count tokens and have no bytes.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    num_window_layers: int = 0
    window: int = 0
    state_bytes: int = 0

    def token_bytes(self, kv_dtype: str) -> int:
        """Returns the bytes of one token's keys and values over the layers of the kv pool."""
        return self.num_layers * self._layer_bytes(kv_dtype)

    def window_token_bytes(self, kv_dtype: str) -> int:
        """Returns the same over the layers of the swa pool."""
        return self.num_window_layers * self._layer_bytes(kv_dtype)

    def _layer_bytes(self, kv_dtype: str) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * ELEMENT_BYTES[kv_dtype]


@dataclass(frozen=True)
class WindowPlan:
    """The swa pool, in usable pages of as many tokens as the kv pool's."""

    window: int
    interval_tokens: int
    pages: int
    floor: int
    page_bytes: int


@dataclass(frozen=True)
class StatePlan:
    """The mamba pool, in usable states; prompts get a snapshot every `interval_tokens`."""

    states: int
    floor: int
    state_bytes: int
    interval_tokens: int


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in usable units: the write sink of the pool is one page more.

    Where no layer keeps keys and values for good, a page has no bytes: it only counts tokens, and
    there are as many as the slots can fill.
    """

    slot_context_tokens: int
    kv_pages: int
    page_tokens: int
    page_bytes: int
    window: WindowPlan | None = None
    states: StatePlan | None = None
    kv_floor: int = MIN_KV_PAGES

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV pool, the sink included."""
        return (self.kv_pages + 1) * self.page_bytes


def ceil_div(dividend: int, divisor: int) -> int:
    """Returns the quotient rounded up, for non-negative integers."""
    return -(-dividend // divisor)


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Returns how many pages hold `num_tokens`."""
    return ceil_div(num_tokens, page_tokens)


def slot_context_tokens(config: EngineConfig, training_tokens: int) -> int:
    """Returns the context of one slot, in tokens.

    The whole context when unified, else an equal share; rounded up to 256 and never more than the
    model was trained on, or than a slot may have. A `context_tokens` of 0 asks for the training
    context.

    Source: llama_context and server_context::init (contract 5.1).
    """
    total = config.context_tokens or training_tokens
    share = total if config.unified else total // config.num_slots
    least = min(_round_up_context(share), training_tokens)
    return min(least, config.slot_tokens) if config.slot_tokens else least


def num_kv_pages(config: EngineConfig, training_tokens: int) -> int:
    """Returns the usable KV pages: as asked for, else ceil(context / page) plus one per slot.

    The page more per slot is for the last, partly filled page of each sequence.
    """
    if config.kv_pages is not None:
        return config.kv_pages
    total = config.context_tokens or training_tokens
    if config.unified:
        tokens = _round_up_context(total)
    else:
        tokens = config.num_slots * _round_up_context(total // config.num_slots)
    return pages_for(tokens, config.page_tokens) + config.num_slots


def swa_floor(config: EngineConfig, window: int, slot_tokens: int) -> int:
    """Returns the fewest swa pages with which no running row can ever lack one.

    Between two trims a sequence grows by the interval or one chunk; one page more is for a start
    inside a page. A context smaller than that bounds it too.
    """
    grown = window + WINDOW_SLACK_TOKENS + max(config.swa_evict_interval, config.chunk_tokens)
    per_row = pages_for(grown, config.page_tokens) + 1
    return config.num_slots * min(per_row, pages_for(slot_tokens, config.page_tokens))


def _plan_window(config: EngineConfig, shape: KvShape, slot_tokens: int) -> WindowPlan | None:
    if not shape.num_window_layers:
        if config.swa_pages is not None:
            raise InvalidField("swa_pages", "the model has no sliding-window layers")
        return None
    floor = swa_floor(config, shape.window, slot_tokens)
    pages = floor if config.swa_pages is None else config.swa_pages
    _at_least("swa_pages", pages, floor)
    return WindowPlan(
        window=shape.window,
        interval_tokens=config.swa_evict_interval,
        pages=pages,
        floor=floor,
        page_bytes=config.page_tokens * shape.window_token_bytes(config.kv_dtype),
    )


def _plan_states(config: EngineConfig, shape: KvShape) -> StatePlan | None:
    if not shape.state_bytes:
        if config.mamba_slots is not None:
            raise InvalidField("mamba_slots", "the model has no recurrent layers")
        return None
    floor = config.num_slots
    states = floor * STATES_PER_SLOT if config.mamba_slots is None else config.mamba_slots
    _at_least("mamba_slots", states, floor)
    # Where a page ends, so that a snapshot and the pages before it go together.
    interval = ceil_div(config.snapshot_interval, config.page_tokens) * config.page_tokens
    return StatePlan(states, floor, shape.state_bytes, interval)


def plan_memory(config: EngineConfig, shape: KvShape, training_tokens: int) -> MemoryPlan:
    """Returns the sizes of an engine of this configuration for a model of this shape.

    Raises:
        InvalidField: a size is out of range; the message has the value and the limit.
    """
    _check(config, training_tokens)
    slot_tokens = slot_context_tokens(config, training_tokens)
    page_bytes = config.page_tokens * shape.token_bytes(config.kv_dtype)
    return MemoryPlan(
        slot_context_tokens=slot_tokens,
        kv_pages=_plan_pages(config, slot_tokens, training_tokens, has_bytes=page_bytes > 0),
        page_tokens=config.page_tokens,
        page_bytes=page_bytes,
        window=_plan_window(config, shape, slot_tokens),
        states=_plan_states(config, shape),
        kv_floor=_kv_floor(config),
    )


def _kv_floor(config: EngineConfig) -> int:
    reserve = config.kv_reserve_tokens or 0
    return max(MIN_KV_PAGES, pages_for(reserve, config.page_tokens))


def _plan_pages(
    config: EngineConfig, slot_tokens: int, training_tokens: int, *, has_bytes: bool
) -> int:
    if has_bytes:
        if config.kv_pages is not None:
            _at_least("kv_pages", config.kv_pages, _kv_floor(config))
        return max(num_kv_pages(config, training_tokens), _kv_floor(config))
    for field, value in (
        ("kv_pages", config.kv_pages),
        ("kv_reserve_tokens", config.kv_reserve_tokens),
    ):
        if value is not None:
            raise InvalidField(field, "the model keeps no keys and values beyond a window")
    return config.num_slots * (pages_for(slot_tokens, config.page_tokens) + 1)


def _round_up_context(num_tokens: int) -> int:
    return max(1, ceil_div(num_tokens, CONTEXT_STEP_TOKENS)) * CONTEXT_STEP_TOKENS


def _check(config: EngineConfig, training_tokens: int) -> None:
    _at_least("context_tokens", config.context_tokens, 0)
    _at_least("num_slots", config.num_slots, 1)
    _at_least("slot_tokens", config.slot_tokens, 0)
    _at_least("page_tokens", config.page_tokens, 1)
    _at_least("chunk_tokens", config.chunk_tokens, 1)
    _at_least("swa_evict_interval", config.swa_evict_interval, 1)
    _at_least("snapshot_interval", config.snapshot_interval, 1)
    _at_least("queue_requests", config.queue_requests, 1)
    _at_least("queue_bytes", config.queue_bytes, 1)
    _at_least("training_tokens", training_tokens, 1)
    if config.memory_budget is not None:
        _at_least("memory_budget", config.memory_budget, 1)
    if config.kv_reserve_tokens is not None:
        _at_least("kv_reserve_tokens", config.kv_reserve_tokens, 0)
    if not 0.0 <= config.slot_similarity <= 1.0:
        raise InvalidField("slot_similarity", f"must be in [0, 1], got {config.slot_similarity}")
    if config.kv_dtype not in ELEMENT_BYTES:
        known = ", ".join(sorted(ELEMENT_BYTES))
        raise InvalidField("kv_dtype", f"must be one of {known}, got {config.kv_dtype!r}")


def _at_least(field: str, value: int, limit: int) -> None:
    if value < limit:
        raise InvalidField(field, f"must be at least {limit}, got {value}")

"""Flags whose feature is planned but not there: they end the start, naming the feature.

A row's neutral values mean what the server does anyway, and pass.
"""

from __future__ import annotations

from typing import Any

from service.flag_values import SWITCH, TEXT, Kind, choice, integer
from service.flags import Flag, Verdict

_RERANKING = "reranking"
_REASONING = "separating a model's reasoning from its answer"


def _later(
    feature: str,
    *names: str,
    kind: Kind = TEXT,
    off: tuple[str, ...] = (),
    variable: str | None = None,
    neutral: tuple[Any, ...] = (),
) -> Flag:
    return Flag(
        names,
        kind,
        dest="later",
        off_names=off,
        verdict=Verdict.LATER,
        note=feature,
        variable=variable,
        neutral=(False, *neutral) if kind is SWITCH else neutral,
    )


DEFERRED = (
    _later(
        "a context limit per slot",
        "--kv-unified-per-slot",
        variable="LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    ),
    _later(
        _RERANKING,
        "--rerank",
        "--reranking",
        kind=SWITCH,
        variable="LLAMA_ARG_RERANKING",
    ),
    _later(
        _REASONING,
        "--reasoning-format",
        kind=choice("auto", "deepseek", "deepseek-legacy", "none"),
        variable="LLAMA_ARG_THINK",
        neutral=("auto", "deepseek"),
    ),
    _later(
        _REASONING,
        "-rea",
        "--reasoning",
        kind=choice("auto", "on", "off"),
        variable="LLAMA_ARG_REASONING",
        neutral=("auto",),
    ),
    _later(_REASONING, "--reasoning-effort", variable="LLAMA_ARG_REASONING_EFFORT"),
    _later(
        _REASONING,
        "--reasoning-budget",
        kind=integer(-1),
        variable="LLAMA_ARG_THINK_BUDGET",
        neutral=(-1,),
    ),
    _later(
        _REASONING,
        "--reasoning-budget-message",
        variable="LLAMA_ARG_THINK_BUDGET_MESSAGE",
        neutral=("",),
    ),
    _later(
        "parsing of tool calls out of answers",
        "--skip-chat-parsing",
        kind=SWITCH,
        off=("--no-skip-chat-parsing",),
        variable="LLAMA_ARG_SKIP_CHAT_PARSING",
    ),
    _later("sleeping when idle", "--sleep-idle-seconds", kind=integer(-1), neutral=(-1,)),
)

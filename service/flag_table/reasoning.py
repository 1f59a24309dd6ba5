"""Flags of how a chat's answer is read, and how long the model may think."""

from __future__ import annotations

from service.flag_values import SWITCH, TEXT, choice, integer, maybe
from service.flags import Flag

_CHAT = "Chat"

REASONING = (
    Flag(
        ("--reasoning-format",),
        choice("none", "auto", "deepseek", "deepseek-legacy"),
        "reasoning_format",
        "where a model's thinking is shown: none leaves it in the content, deepseek puts it into "
        "reasoning_content, deepseek-legacy into both; auto is deepseek",
        default="deepseek",
        variable="LLAMA_ARG_THINK",
        group=_CHAT,
    ),
    Flag(
        ("-rea", "--reasoning"),
        maybe(),
        "thinks",
        "whether the chat template lets the model think; auto leaves it to the template",
        variable="LLAMA_ARG_REASONING",
        group=_CHAT,
    ),
    Flag(
        ("--reasoning-effort",),
        TEXT,
        "reasoning_effort",
        "effort that the chat template is told, such as low or high; default leaves it out",
        default="default",
        variable="LLAMA_ARG_REASONING_EFFORT",
        group=_CHAT,
    ),
    Flag(
        ("--reasoning-budget",),
        integer(-1),
        "reasoning_budget",
        "most tokens of thinking; -1 is unlimited, 0 ends it at once",
        default=-1,
        variable="LLAMA_ARG_THINK_BUDGET",
        group=_CHAT,
    ),
    Flag(
        ("--reasoning-budget-message",),
        TEXT,
        "reasoning_budget_message",
        "text that the model is made to say before its thinking is ended",
        default="",
        variable="LLAMA_ARG_THINK_BUDGET_MESSAGE",
        group=_CHAT,
    ),
    Flag(
        ("--skip-chat-parsing",),
        SWITCH,
        "skips_chat_parsing",
        "leave thinking and tool calls in the content of a chat's answer",
        off_names=("--no-skip-chat-parsing",),
        default=False,
        variable="LLAMA_ARG_SKIP_CHAT_PARSING",
        group=_CHAT,
    ),
)

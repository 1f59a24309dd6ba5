"""What a request that says nothing runs under: the flags, then the model's file, then our own."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engine.gguf.sampling import SamplingHints
from engine.requests import Pooling, Sampler, SamplingParams
from service.flag_values import sampler_by_name

_LOG = logging.getLogger("kvarts.service")


@dataclass(frozen=True)
class EmbeddingDefaults:
    """How vectors are made where a request is silent. `norm` is as `engine.pooling` means it."""

    pooling: Pooling
    norm: int = 2


@dataclass(frozen=True)
class ReasoningDefaults:
    """How a model's thinking is shown and limited.

    `format` is one of `none`, `auto`, `deepseek`, `deepseek-legacy`. `budget_tokens` is the limit
    of each reasoning, -1 none; `budget_message` comes before the tag that then ends it.
    """

    format: str = "deepseek"
    budget_tokens: int = -1
    budget_message: str = ""


@dataclass(frozen=True)
class GenerationDefaults:
    """The server's defaults, in the units and ranges of `engine.requests.Request`.

    `grammar` is GBNF, "" for none. `prefill_assistant`: a trailing assistant message is continued.
    `template_kwargs` are variables of the chat template that a request's own are merged over.
    `parses_chat` False leaves reasoning and tool calls in a chat's content.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    n_keep: int = 0
    n_cache_reuse: int = 0
    render_special: bool = False
    grammar: str = ""
    prefill_assistant: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reasoning: ReasoningDefaults = field(default_factory=ReasoningDefaults)
    parses_chat: bool = True


def with_hints(
    defaults: GenerationDefaults, hints: SamplingHints, *, given: Collection[str]
) -> GenerationDefaults:
    """Lets the model's file speak where the operator was silent.

    Args:
        defaults: what the flags say, filled up by our own values.
        hints: what the file says.
        given: the fields of `defaults.sampling` that a flag set.
    """
    changes: dict[str, Any] = {
        name: value
        for name, value in asdict(hints).items()
        if value is not None and name not in given
    }
    if "samplers" in changes:
        changes["samplers"] = _samplers(changes["samplers"])
    return replace(defaults, sampling=replace(defaults.sampling, **changes))


def _samplers(names: tuple[str, ...]) -> tuple[Sampler, ...]:
    """The peer's rule: what is no sampler is left out, with a warning."""
    found: list[Sampler] = []
    for name in names:
        sampler = sampler_by_name(name)
        if sampler is None:
            _LOG.warning("the model's file names a sampler that there is not: %.40r", name)
        else:
            found.append(sampler)
    return tuple(found)

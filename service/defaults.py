"""What a request that says nothing runs under; the flag table fills it at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.types import SamplingParams


@dataclass(frozen=True)
class GenerationDefaults:
    """The server's defaults, in the units and ranges of `engine.types.Request`.

    `prefill_assistant`: a trailing assistant message is continued. `template_kwargs` are variables
    of the chat template that a request's own are merged over.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    n_keep: int = 0
    n_cache_reuse: int = 0
    render_special: bool = False
    prefill_assistant: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

"""How llama.cpp prints a whole prompt: without the space that the vocabulary added, and tidied.

Single pieces, and what `/detokenize` answers, keep every space; only the echo of a prompt is tidy.
Knows no vocabulary.
"""

from __future__ import annotations

import re

# The byte-pair pre-tokenizers whose texts keep their spaces.
_KEEPS_SPACES = frozenset(
    {
        "afmoe", "bailingmoe", "bailingmoe2", "chameleon", "cohere2moe", "command-r",
        "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "f2llmv2", "gpt-4o",
        "granite-docling", "granite-embed-multi-97m", "grok-2", "hunyuan", "hunyuan-dense",
        "hy_v4", "joyai-llm", "kanana2", "kimi-k2", "kormo", "laguna", "llada-moe", "llama4",
        "minimax-m2", "poro-chat", "qwen2", "qwen35", "sarvam-moe", "seed-coder", "smollm",
        "solar-open", "spark2_5", "superbpe", "talkie", "tekken", "tiny_aya", "trillion",
        "ufakzeka", "viking", "youtu",
    }
)  # fmt: skip

_BEFORE_MARK = re.compile(rb" (?=[?!.,])")
_LONE_APOSTROPHE = re.compile(rb" ' ")
_BEFORE_CONTRACTION = re.compile(rb" (?='(?:[sm]|[rv]e))")


def keeps_spaces(pre: str | None) -> bool:
    """Returns whether texts of a byte-pair vocabulary with this `tokenizer.ggml.pre` stay as are.

    Source: llama.cpp `llama_vocab::impl::load`, `clean_spaces`.
    """
    return pre in _KEEPS_SPACES


def tidied(text: bytes) -> bytes:
    """Returns a text without the spaces before marks, around lone apostrophes and before endings.

    Source: llama.cpp `llama_vocab::impl::detokenize`, its three passes.
    """
    text = _BEFORE_MARK.sub(b"", text)
    text = _LONE_APOSTROPHE.sub(b"'", text)
    return _BEFORE_CONTRACTION.sub(b"", text)
